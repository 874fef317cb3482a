"""Metadata of items, and filters on them. Start with `index.metadata.filter` (what a filter means)."""
