"""Registered versions: folders on their way in, and what this process has loaded."""
