"""The service's own pages, `/console` and `/docs`, with all their files."""
