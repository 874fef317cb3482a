"""Versions and edges as this process has loaded them, their encoders, and the placement of items by them."""
