"""What searches the vectors of one version in one gallery: exact, by a graph (HNSW) or by inverted lists (IVF)."""
