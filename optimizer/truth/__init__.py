"""What the right tokens are: the oracle, its weights and the bands that judge by it."""
