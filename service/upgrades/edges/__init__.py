"""Edges that come and go: accepted, fitted on stored items, claimed and verified, removed."""
