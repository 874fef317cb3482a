"""Rollouts: shadow and canary, who is asked, and the end of a canary."""
