"""Deployments of the service."""
