"""Plans as a training step holds them, and the tokens that they spread."""
