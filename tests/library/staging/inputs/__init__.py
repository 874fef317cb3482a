"""Versions, images, models and short trainings that tests use."""
