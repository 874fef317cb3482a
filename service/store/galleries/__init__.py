"""SQL of a gallery and of all that it holds: items, embeddings, its change feed."""
