"""The Triton code of rows and of merges in Triton's CPU interpreter, in fp16 and fp32 (its bf16 is wrong).

Not collected: `test_rows.py` runs this file in a process of its own with TRITON_INTERPRET=1, because Triton
chooses its interpreter for good when it is first imported.
"""

import pytest
import torch

from magi_compile.dtensor.transport import rows_triton
from magi_compile.kernels.base import ForwardOutput
from magi_compile.kernels.triton import merge as merge_triton
from tests.dtensor.support.moves import check_moves, check_sums
from tests.kernels.support.partials import SHAPES, check_merge, check_sum
from tests.support.triton_interpreter import _interpreter  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy tells of every -inf

DTYPES = [torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_move(dtype):
    check_moves(rows_triton.move, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype):
    def write(sums, *tensors):
        rows_triton.write_sums(*tensors, sums._begin, sums._order, sums._opens)

    check_sums(write, dtype, out_dtypes=DTYPES)


def merge_prior(output, prior, out_dtype):
    partials = [output] if prior is None else [prior, output]
    return ForwardOutput(*merge_triton.merge(*zip(*partials, strict=True), out_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_partials", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partials(shape, num_partials, dtype):
    check_merge(merge_prior, shape, num_partials, dtype)
    check_sum(merge_triton.add, shape, num_partials, dtype)
