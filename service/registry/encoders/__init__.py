"""Encoders: loaded on first use, run in dynamic batches."""
