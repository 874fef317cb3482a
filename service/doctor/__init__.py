"""The doctor: checks of a data folder, with advice and safe fixes; start at `examination`."""
