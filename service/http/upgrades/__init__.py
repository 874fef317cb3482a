"""Versions over HTTP, and what leads from one to the next: edges, evaluation sets, gates, deployments."""
