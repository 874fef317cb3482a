"""Evaluation of versions: every pair of them compared as a gallery would, as tables, pictures and an HTML report."""
