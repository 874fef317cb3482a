"""Gates: their samples, the measurement and its report, and the score maps that they store."""
