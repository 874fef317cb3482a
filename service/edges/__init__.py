"""Edges between versions: accepted, fitted, claimed, removed."""
