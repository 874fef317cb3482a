"""Backfills over HTTP: start, watch and stop them; and the chunks that remote workers claim and return."""
