"""Galleries and their items over HTTP: create, fill, list, change, delete."""
