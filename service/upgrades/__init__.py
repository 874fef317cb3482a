"""Changes of the version that answers queries: edges, gates, deployments, trials, and the curves of backfills."""
