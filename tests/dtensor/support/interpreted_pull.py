"""The kernel that reads rows from peers in Triton's CPU interpreter, where peers are tensors of this process.

Not collected: `test_pulls.py` runs this file in a process of its own with TRITON_INTERPRET=1, because Triton
chooses its interpreter for good when it is first imported.
"""

import pytest
import torch

from magi_compile.dtensor.transport.native import pull_triton
from magi_compile.dtensor.transport.native.pulls import Pulls
from tests.dtensor.support.wanted import expected_buffer, home_rows, random_ranges, routes_of
from tests.support.triton_interpreter import _interpreter  # noqa: F401

ROWS = 200


@pytest.mark.parametrize("num_programs", [1, 3, 64])
@pytest.mark.parametrize("width", [1, 24, pull_triton.MAX_BLOCK + 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
def test_pull(dtype, width, num_programs):
    size = 3
    routes = routes_of(random_ranges(size, ROWS, 20, seed=width), seed=width)
    homes = [10 * home_rows(rank, ROWS, (width,), torch.float32).to(dtype) for rank in range(size)]
    offset = 48
    addresses = torch.tensor([home.data_ptr() - offset for home in homes])
    for rank, route in enumerate(routes):
        places = Pulls(route.host_recvs.tolist(), rank, size, route.recvs.device).places
        target = torch.full((route.num_received, width), 99).to(dtype)
        pull_triton.pull(target, places, addresses, offset, num_programs)
        assert torch.equal(target, expected_buffer(route, homes))
