"""`magi-bench ranks`: ways to run attention across ranks, side by side, host included."""
