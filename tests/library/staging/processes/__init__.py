"""Real processes of Regraft, and a load on them."""
