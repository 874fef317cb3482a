"""Gates of the service."""
