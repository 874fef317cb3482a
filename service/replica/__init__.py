"""The replica: every gallery in memory, at one number of its change feed."""
