"""Writes of items: a batch is checked, embedded and stored in one transaction; metadata are changed, items deleted."""
