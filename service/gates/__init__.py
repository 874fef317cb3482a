"""Gates: evaluation sets, what is measured on them, the verdict, the score maps it leaves."""
