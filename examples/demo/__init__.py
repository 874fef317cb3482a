"""The upgrade demo, with real processes and real images: `python -m examples.demo`."""
