"""Encoders at work: loaded when needed, run in batches, unloaded when idle."""
