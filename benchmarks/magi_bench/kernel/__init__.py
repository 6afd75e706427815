"""`magi-bench kernel` and `sparse`: contenders on cells, each in a process of its own."""
