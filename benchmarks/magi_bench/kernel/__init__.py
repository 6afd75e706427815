"""`magi-bench kernel` and `sparse`: contenders on cases, each in a process of its own."""
