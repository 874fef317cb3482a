"""What every route checks before its own work, and what it takes besides a body."""
