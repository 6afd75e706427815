"""Moving rows: on the CPU, on a GPU, and its Triton code in Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from magi_compile.dtensor.transport import rows
from tests.dtensor.support.moves import check_moves, check_sums
from tests.support.triton_interpreter import needs_triton, run_interpreted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_move(device, dtype):
    check_moves(rows.move, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_gather_and_split(device):
    x, y = torch.arange(12.0, device=device).view(6, 2), torch.arange(36.0, device=device)
    tensors, index = [x, y.view(6, 2, 3)], torch.tensor([4, 0, 4], dtype=torch.int32).to(device)
    packed = rows.gather(tensors, index)
    assert packed.shape == (3, 8)
    for part, tensor in zip(rows.split(packed, tensors), tensors, strict=True):
        assert torch.equal(part, tensor[[4, 0, 4]])
    assert rows.gather(tensors, index[:0]).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_sums_in_the_order_of_ranks(device, dtype):
    check_sums(rows.Sums.write, dtype, device)


def test_rows_of():
    first, count = torch.tensor([5, 0, 9]), torch.tensor([2, 0, 3])
    assert rows.rows_of(first, count, 5).tolist() == [5, 6, 9, 10, 11]


@needs_triton
def test_in_the_interpreter():
    """See `interpreted_rows.py`."""
    run_interpreted(Path(__file__).parents[1] / "support" / "interpreted_rows.py")
