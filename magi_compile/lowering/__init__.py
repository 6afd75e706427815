"""Finding FlexAttention in a graph and replacing it. Knows nothing of distribution."""
