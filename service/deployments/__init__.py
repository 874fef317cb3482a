"""Deployments: the table of steps, trials beside live queries, what each step does to the items."""
