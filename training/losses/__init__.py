"""Losses as pure functions, the geometry that they need, and how they see the batch of all processes."""
