"""Version folders of models of torch: sources of `index.creation.create`."""
