"""The live curve of a backfill: its queries, their scores, and its marks, which are claimed and stored."""
