"""Plans of self-attention are those of before queries and keys could lie apart."""

import hashlib

import pytest
import torch

from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions, plan_rank_together
from magi_compile.masks.slices import AttnSlices
from tests.dtensor.support.masks import SQUARE


def said(where, stages):
    """All that a plan says, in whatever slices."""
    yield where.chunks
    for stage in stages:
        slices = stage.slices
        yield slices.to_dense()
        yield torch.tensor([slices.seqlen_q, slices.seqlen_k])
        if stage.transfer is not None:
            yield from stage.transfer[:2]
            yield torch.tensor([*stage.transfer.send_counts, *stage.transfer.recv_counts])


def digest_of(lists_of_masks, options):
    hasher = hashlib.sha256()
    for masks in lists_of_masks:
        for size in (2, 8):
            for plan in plan_rank_together(masks, size, size - 1, options):
                for x in said(plan.dispatch, plan.forward + plan.backward):
                    hasher.update(x.long().contiguous().numpy().tobytes())
    return hasher.hexdigest()[:16]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ContextParallelOptions(chunk_size=16), "4efe7fafd5a39731"),
        (ContextParallelOptions(chunk_size=16, degree=0, backward_degree=2), "7acd19ad0aed962b"),
        (ContextParallelOptions(chunk_size=8, strategy="min_heap", degree=1), "71d146a1a95656b4"),
        (ContextParallelOptions(), "23ea3c5d12d176a6"),
    ],
)
def test_plans(options, expected):
    together = [AttnSlices.causal(512), AttnSlices.sliding_window(512, 512, (64, 0))]
    lists = [*([case.slices()] for case in SQUARE.values()), together]
    assert digest_of(lists, options) == expected
