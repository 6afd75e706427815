"""Tokens that somebody else has spread: PyTorch's load balancers, any permutation; and ours in that form."""

import re

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel import _attention, _load_balancer

import magi_compile
from magi_compile import AttnSlices
from magi_compile.dtensor import ContextParallelOptions, plan
from magi_compile.dtensor.planning.dispatch import dispatch_as
from tests.dtensor.test_packing_with_context_parallel import OPTIONS, mesh_of

S = 256
DOCUMENTS = AttnSlices.from_cu_seqlens([0, 37, 64, 200, S], causal=True)


def head_tail(size):
    return _load_balancer._HeadTailLoadBalancer(S, size, "cpu")


def per_document(size):
    return _load_balancer._PerDocumentHeadTailLoadBalancer([[64, 128, 64]], size, "cpu")


def by_blocks(size):
    mask = torch.nn.attention.flex_attention.create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, S, S, "cpu", BLOCK_SIZE=16
    )
    return _load_balancer._PTRRLoadBalancer(mask, size)


def scattered(size):
    return torch.randperm(S, generator=torch.Generator().manual_seed(size))


class Titan:
    """A balancer of the form that torchtitan has."""

    def __init__(self, size):
        self.size = size

    def generate_permutation(self):
        return torch.arange(S).view(-1, self.size, 4).transpose(0, 1).reshape(1, -1)


def backwards(size):
    """Chunks of 8 tokens, from the last one on."""
    return torch.arange(S).view(-1, 8).flip(0).flatten()[None]


def run(group, make, options):
    """Forward and gradients against one process's, row by row of the parts that the permutation gives."""
    size, rank = group.size(), group.rank()
    given = make(size)
    where = given
    if not isinstance(given, torch.Tensor):
        titan = isinstance(given, Titan)
        where = given.generate_permutation() if titan else given._generate_indices()
    where = where.long()
    here = where.flatten().chunk(size)[rank]
    p = plan(DOCUMENTS, mesh_of(group), options=options, permutation=given)
    torch.testing.assert_close(p.positions, here)
    torch.testing.assert_close(p.permutation(), where.view(1, -1))
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(S, n, 8, generator=generator) for n in (2, 1, 1, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = magi_compile.flex_flash_attention(*leaves, DOCUMENTS).out
    wanted = (out, *torch.autograd.grad(out, leaves, dout))
    inputs = [x[here].requires_grad_() for x in (q, k, v)]
    out = p.attention(*inputs)
    found = (out, *torch.autograd.grad(out, inputs, dout[here]))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y[here], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(p.unshard(x, 0), y, rtol=1e-5, atol=1e-5)
    return p.placement.chunk_size


STAGED = ContextParallelOptions(degree=2, backward_degree=1)
MERGED = ContextParallelOptions(degree=0, backward_degree=0, early=False)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("make", "options", "chunk_size"),
    [
        (head_tail, STAGED, lambda size: S // (2 * size)),
        (per_document, STAGED, lambda size: 64 // (2 * size)),
        (by_blocks, STAGED, lambda size: 16),
        (Titan, STAGED, lambda size: 4),
        (backwards, STAGED, lambda size: 8),
        (backwards, MERGED, lambda size: 8),
        (scattered, STAGED, lambda size: 1),
        (scattered, MERGED, lambda size: 1),
    ],
)
def test_given_permutations(ranks_of, size, make, options, chunk_size):
    assert ranks_of(size).run(run, make, options) == [chunk_size(size)] * size


def run_ours(group):
    """PyTorch spreads by our plan."""
    p = plan(DOCUMENTS, mesh_of(group), options=OPTIONS)
    tokens = torch.arange(2 * S).view(2, S)
    (local,) = _attention._context_parallel_shard(mesh_of(group), [tokens], [1], load_balancer=p)
    torch.testing.assert_close(local, p.shard(tokens, 1))
    (whole,) = _attention.context_parallel_unshard(mesh_of(group), [local], [1], load_balancer=p)
    torch.testing.assert_close(whole, tokens)
    torch.testing.assert_close(p.permutation()[0][p.permutation(restore=True)[0]], torch.arange(S))
    torch.testing.assert_close(p.generate_permutation(), p.permutation())
    # And one plan by another one's, for a mask that comes later.
    again = plan(AttnSlices.causal(S), mesh_of(group), permutation=p)
    assert again.has_the_tokens_of(p)
    padded = plan(None, mesh_of(group), seqlen=S - 1, options=OPTIONS)
    with pytest.raises(ValueError, match="a `permutation` needs a plan without padding, but 255"):
        padded.permutation()
    again = plan(AttnSlices.full(S - 1), mesh_of(group), permutation=padded)
    assert again.has_the_tokens_of(padded)
    assert again.has_padding
    check_attention(again, AttnSlices.full(S - 1))
    with pytest.raises(
        ValueError, match="must be a plan of the 256 tokens of the mask on 2 ranks, got one of 255"
    ):
        plan(DOCUMENTS, mesh_of(group), permutation=padded)


def check_attention(p, slices):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(p.total, n, 8, generator=generator) for n in (2, 1, 1))
    found = p.unshard(p.attention(*(p.shard(x, 0) for x in (q, k, v))), 0)
    wanted = magi_compile.flex_flash_attention(q, k, v, slices).out
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_ours_as_a_load_balancer(ranks_of):
    ranks_of(2).run(run_ours)


def run_refused(group):
    for error, message, given in [
        (
            TypeError,
            "`permutation` must be a tensor or a load balancer of PyTorch's or torchtitan's, got int",
            3,
        ),
        (
            ValueError,
            "`permutation` must be integers [S] or [1, S], got torch.float32",
            torch.rand(S),
        ),
        (
            ValueError,
            "`permutation` must contain each of 0 ... S - 1 exactly once",
            torch.zeros(S).long(),
        ),
        (
            ValueError,
            "`permutation` must have the 256 tokens of the mask, a multiple of the 2 ranks, got shape [128]",
            torch.arange(128),
        ),
        (
            NotImplementedError,
            "`permutation` must be the same for all entries of a batch",
            torch.stack([torch.arange(S), torch.arange(S).flip(0)]),
        ),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            plan(DOCUMENTS, mesh_of(group), permutation=given)
    # Masks of several layers lie alike.
    plans = plan(
        masks=[DOCUMENTS, AttnSlices.causal(S)], mesh=mesh_of(group), permutation=scattered(2)
    )
    assert plans[0].has_the_tokens_of(plans[1])


def test_permutations_that_do_not_fit(ranks_of):
    ranks_of(2).run(run_refused)


def test_the_length_must_be_a_multiple_of_the_ranks():
    with pytest.raises(ValueError, match="a multiple of the 3 ranks"):
        dispatch_as([DOCUMENTS], 3, torch.arange(S))
