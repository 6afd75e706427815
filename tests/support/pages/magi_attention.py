"""A process group of one rank, and projections."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = "cpu"
to_q, to_k, to_v = (torch.nn.Linear(256, heads * 64) for heads in (4, 2, 2))


def check(line, names):
    assert names["x"].grad.isfinite().all()
    assert names["out"].shape == (4096, 4, 64)
