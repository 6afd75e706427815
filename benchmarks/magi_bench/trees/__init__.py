"""`magi-bench trees`: the speed of several checkouts of this package, interleaved on one device."""
