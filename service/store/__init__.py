"""Store of the service."""
