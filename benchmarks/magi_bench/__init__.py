"""magi-bench: one workload for every attention kernel, from a command line. See docs/benchmark.md.

Settings -> Case -> Contender -> gate, turns -> Row -> report, chart, compare. `runner` runs the suites of `step`,
`mods`, `ranks`, `doors` and `plans`; `kernel` and `trees` have a process for each contender.
"""
