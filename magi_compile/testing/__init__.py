"""Shared by tests and benchmarks: named cases, and the rule of correctness."""
