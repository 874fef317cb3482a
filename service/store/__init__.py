"""SQL is the truth: tables, statements, leases, the audit; and the images."""
