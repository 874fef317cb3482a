"""The live curve of a backfill: probes, what they find meanwhile, and the points of it."""
