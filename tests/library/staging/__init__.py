"""Helpers of several tests: models of the promised behaviour, real processes, a constant load (docs/packages.md)."""
