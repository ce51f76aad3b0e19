"""Self-attention as a flow of interacting particles."""
