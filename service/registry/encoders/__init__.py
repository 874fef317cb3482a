"""Encoders of the service."""
