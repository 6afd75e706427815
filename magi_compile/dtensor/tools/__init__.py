"""Measures the rates of a machine, for planning."""
