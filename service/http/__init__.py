"""Http of the service."""
