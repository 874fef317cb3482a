"""Gates: what is measured on which items, the verdict, the score maps it leaves."""
