"""`python -m magi_bench`, the same as `magi-bench`."""

from magi_bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
