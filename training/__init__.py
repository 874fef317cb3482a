"""Offline training and evaluation of compatible versions."""
