"""Backfills: planning, chunks, and the workers that process them."""
