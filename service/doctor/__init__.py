"""The doctor: what should not be there, what to do about it, and the mending of what is safe."""
