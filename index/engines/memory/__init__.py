"""The engine in memory: rows that are scanned, and sealed segments with an approximate index."""
