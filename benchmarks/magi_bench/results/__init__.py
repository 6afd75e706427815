"""Rows on disk: where they come from, and two of them side by side."""
