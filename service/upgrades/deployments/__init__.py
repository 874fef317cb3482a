"""Deployments: their steps, the effect of a refused gate, retiring versions and freeing their embeddings."""
