"""Metrics, gates, fitted edges and calibrations. Start with `index.evaluation.metrics` and `index.evaluation.gate`."""
