"""Registry of the service."""
