"""Metrics, gates, fits and calibrations: what is measured, and what is made of it; serving needs only the gate."""
