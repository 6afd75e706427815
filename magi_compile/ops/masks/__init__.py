"""The ops that make slices: of a mask program and its captured tensors, or of what a graph computes itself."""
