"""The live curve of a backfill: who asks, what answers are worth, marks that are claimed and stored."""
