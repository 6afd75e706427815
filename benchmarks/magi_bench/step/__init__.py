"""`magi-bench step`: wall time of calls and of training steps, host included, in turns with peers in one process."""
