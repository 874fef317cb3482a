"""Changes of the version that answers queries: edges, gates, deployments, rollouts, and the curves of backfills."""
