"""Ranks that differ, and ranks that do not come."""
