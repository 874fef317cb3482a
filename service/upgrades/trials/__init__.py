"""Trials: shadow and canary, which version answers a query, and the end of a canary."""
