"""Stored vectors: their form, their files in the image store, and the only access to them."""
