"""Import sources into galleries (`imports`) and export galleries to files (`exports`), page by page."""
