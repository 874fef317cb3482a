"""Curves of the service."""
