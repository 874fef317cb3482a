"""Replica of the service."""
