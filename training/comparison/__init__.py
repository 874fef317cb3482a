"""Many trainings: all methods of a family over several seeds, the papers' tables beside ours, and sweeps of weights."""
