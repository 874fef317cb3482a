"""Edges between versions: their transforms, score maps, and routes along them. Start with `index.edges.transform`."""
