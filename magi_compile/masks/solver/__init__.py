"""The solver: a program as key intervals whose edges are expressions of the row, without data."""
