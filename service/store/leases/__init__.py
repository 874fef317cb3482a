"""What one process at a time may do, and the heartbeats that keep it so."""
