"""The doctor: checks a data folder, says what to do, and fixes what is safe."""
