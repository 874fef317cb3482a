"""What several tests share: models of what is promised, real processes, and a constant load."""
