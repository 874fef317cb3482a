"""Galleries and their items: create, ingest, read, delete."""
