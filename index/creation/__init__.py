"""Making version folders of models and vectors that come from elsewhere; no torch."""
