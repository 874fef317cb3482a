"""The work of a backfill over HTTP, for workers without the database."""
