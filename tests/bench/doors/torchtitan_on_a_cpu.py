"""`magi_bench.doors.torchtitan` on a CPU, with what torchtitan lacks for it: the example prepares that."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[3] / "examples" / "torchtitan_packed.py"))

from magi_bench.doors.torchtitan import main  # noqa: E402

main()
