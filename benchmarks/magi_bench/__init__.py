"""magi-bench: one workload for every attention kernel, from a command line. See docs/benchmark.md.

Settings -> Case -> Contender -> gate, turns -> Row -> report, chart, compare. `runner` runs the suites of all commands
but `kernel` and `sparse`, which have a process for each contender.
"""
