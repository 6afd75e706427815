"""`python -m magi_compile.bench`, the same as `magi-bench`."""

from magi_compile.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
