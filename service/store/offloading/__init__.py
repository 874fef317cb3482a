"""Vectors move from the database into files of the image store, and back."""
