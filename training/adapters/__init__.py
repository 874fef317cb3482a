"""Edges between versions that exist, fitted on pairs of their embeddings. Start with `training.adapters.fit_edge`."""
