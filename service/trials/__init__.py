"""Trials: a new version beside live queries, as shadow or canary."""
