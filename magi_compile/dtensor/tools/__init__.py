"""Tools around planning: simulates placements, measures the rates of a machine, draws document lengths."""
