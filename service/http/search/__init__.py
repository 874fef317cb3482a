"""Queries: read from JSON, forms, arrays and tables, searched alone or several together, and answered."""
