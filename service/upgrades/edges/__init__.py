"""Edges of the service."""
