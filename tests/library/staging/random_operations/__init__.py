"""Plain models of the promised behaviour, and random operations to compare with them."""
