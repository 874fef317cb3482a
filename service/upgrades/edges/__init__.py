"""Edges: accept, fit on stored items, verify an identity claim, remove."""
