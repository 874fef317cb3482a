"""Versions and edges as this process knows them, their encoders, and where items belong by them."""
