"""Programs: a mask function as an expression over positions and captured tensors, read from a graph or by a call."""
