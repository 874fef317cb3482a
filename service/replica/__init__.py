"""The replica: a process's galleries in memory, each at one number of its change feed."""
