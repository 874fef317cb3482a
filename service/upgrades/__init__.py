"""Upgrades of the service."""
