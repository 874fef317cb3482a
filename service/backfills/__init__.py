"""Backfills: planned, cut into chunks, worked on by any number of workers."""
