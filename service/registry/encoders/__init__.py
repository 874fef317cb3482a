"""Encoders: loaded when needed, run in dynamic batches."""
