"""Databases and galleries in the states that tests need."""
