"""Two processes over gloo that train one model together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import magi_compile
from tests.programs.model import (
    assert_near,
    backend_of,
    batch,
    check_lowered,
    count_runs,
    gradients_of,
    make_model,
    num_graphs,
    reference,
)

SIZE = 2


def spawn(function: Callable[[Any], None], door: str) -> None:
    """Forks, which need not import again: this process has run nothing yet."""
    with tempfile.TemporaryDirectory() as folder:
        given = (function, door, f"{folder}/store")
        mp.start_processes(_enter, given, nprocs=SIZE, start_method="fork")


def _enter(rank: int, function: Callable[[Any], None], door: str, store: str) -> None:
    torch.set_num_threads(1)
    if door == "enable":
        magi_compile.enable()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    count_runs()
    function(backend_of(door))
    dist.destroy_process_group()


def train(run: Callable[[Tensor, Tensor], Tensor], model: torch.nn.Module) -> None:
    """Each rank has other documents; gradients are the mean."""
    state = make_model().state_dict()
    graphs = None
    for step in range(4):
        mine = [SIZE * step + rank for rank in range(SIZE)]
        outs, grads = reference(state, mine)
        x, document, weights = batch(mine[dist.get_rank()])
        model.zero_grad()
        out = run(x, document)
        (out * weights).sum().backward()
        assert_near(out, outs[dist.get_rank()], 1e-4, f"the output of step {step}")
        ours = gradients_of(model)
        assert ours.keys() == grads.keys()
        for name, grad in grads.items():
            mean = ours[name]
            mean = mean.full_tensor() if isinstance(mean, DTensor) else mean
            assert_near(mean, grad / SIZE, 1e-4, f"the gradient of {name}")
        assert graphs in (None, num_graphs()), f"step {step} has compiled again"
        graphs = num_graphs()
    check_lowered()


def run_fsdp2(backend: Any) -> None:
    model = make_model()
    for block in model.blocks:
        block.compile(backend=backend)
        fully_shard(block)
    fully_shard(model)
    train(model, model)


def run_ddp(backend: Any) -> None:
    model = DistributedDataParallel(make_model())
    train(torch.compile(model, backend=backend), model)
