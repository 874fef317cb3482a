"""Deployments: the table of steps, what a refused gate stops, retiring and freeing."""
