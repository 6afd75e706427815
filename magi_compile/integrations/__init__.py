"""Doors in other frameworks. Each module is the only importer of its framework, and is imported by name."""
