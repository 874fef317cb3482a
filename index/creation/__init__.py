"""Create version folders from existing models and vectors, without torch. Start with `index.creation.create`."""
