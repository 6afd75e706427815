"""The lists of a forward that begins early, by the kernel that makes them on a GPU, on a CPU."""

import pytest

from magi_compile.kernels.sm90.forward.overlap import early_plan
from tests.kernels.support.on_a_cpu import launching


def early_plan_on_cpu(compiled, walk, tiles, remote_begin):
    """See `early_plan`; `compiled` is what `compile_once` gives."""

    def launch(function, grid, block, params, stream, options):
        function(grid, block, params)

    with pytest.MonkeyPatch.context() as patch, launching(patch, compiled, 1, launch):
        return early_plan(walk, tiles, remote_begin)
