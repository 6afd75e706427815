"""Evaluation: a solved program on data, as key intervals of each row and as slices, with its checks."""
