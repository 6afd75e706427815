"""When the native collective refuses, and that it says why."""

import logging

import pytest
import torch
import torch.distributed as dist

from magi_compile.dtensor.transport.collectives import logger, select
from magi_compile.dtensor.transport.native.peers import RankDevice, conflicts
from tests.dtensor.support.ranks import Ranks


def test_one_host_and_a_gpu_each():
    assert conflicts([RankDevice("a", "0"), RankDevice("a", "1")]) == []


def test_hosts():
    (why,) = conflicts([RankDevice("b", "0"), RankDevice("a", "1"), RankDevice("b", "2")])
    assert why == "ranks must be on one host, got a, b"


def test_shared_gpus():
    (why,) = conflicts([RankDevice("a", "0"), RankDevice("a", "1"), RankDevice("a", "0")])
    assert "the ranks [0, 2] share one" in why


def run_on_cpus(group):
    cpu = torch.device("cpu")
    with pytest.raises(NotImplementedError, match="native: needs a GPU, got cpu"):
        select("native", group, cpu)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    assert select("auto", group, torch.device("cpu", 0)).name == "all_to_all"
    logger.removeHandler(handler)
    return messages


def test_cpus(ranks_of):
    message, *rest = ranks_of(2).run(run_on_cpus)
    expected = "the collective for cpu:0 is all_to_all, because\n  native: needs a GPU, got cpu:0"
    assert message == [expected]
    assert rest == [[]]  # one rank tells


def run_over_gloo_on_one_gpu(group):
    device = torch.device("cuda", 0)
    with pytest.raises(NotImplementedError, match=r"native: .* the ranks \[0, 1\] share one"):
        select("native", group, device)
    dist.barrier(group)


@pytest.mark.gpu
def test_ranks_that_share_a_gpu():
    ranks = Ranks(2, "gloo", uses_gpus=True)
    try:
        ranks.run(run_over_gloo_on_one_gpu)
    finally:
        ranks.close()
