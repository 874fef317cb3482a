"""What changes which version answers: edges, gates, deployments, rollouts, and the curves measured along the way."""
