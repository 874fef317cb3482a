"""What is trained: a backbone with its embedding head, classification heads, and the network of side-information."""
