"""Rollouts of the service."""
