"""Requests to a real server, and answers."""
