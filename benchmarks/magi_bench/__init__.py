"""magi-bench: one workload for every attention kernel, from a command line. See docs/benchmark.md.

cells -> workload -> contenders -> measure -> worker -> run -> rows -> report, compare
"""
