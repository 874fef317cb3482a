"""The upgrade story, told with real processes and real images: `python -m examples.demo`."""
