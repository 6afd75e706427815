"""`plan.roll`: `torch.roll` along a sequence whose tokens lie on several ranks."""

import pytest
import torch

from magi_compile import AttnSlices
from magi_compile.dtensor import ContextParallelOptions, plan
from tests.dtensor.test_packing_with_context_parallel import mesh_of

S = 200  # no multiple of ranks and chunks: there is padding
DOCUMENTS = AttnSlices.from_cu_seqlens([0, 37, 64, 150, S], causal=True)
OPTIONS = ContextParallelOptions(chunk_size=16)
SHIFTS = (1, -1, -3, 0, 90, -S - 5)


def wholes():
    generator = torch.Generator().manual_seed(0)
    yield torch.randn(2, S, 3, generator=generator), 1
    yield torch.randn(S, generator=generator).bfloat16(), 0
    yield torch.randint(0, 9, (2, 3, S), generator=generator), -1
    yield torch.rand(S, 4, generator=generator) > 0.5, 0


def values(group):
    p = plan(DOCUMENTS, mesh_of(group), options=OPTIONS)
    assert p.has_padding
    for whole, dim in wholes():
        for shifts in SHIFTS:
            found = p.roll(p.shard(whole, dim), shifts, dim)
            assert found.dtype == whole.dtype
            expected = p.shard(whole.roll(shifts, dim), dim)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def gradients(group, compiled):
    def loss(x, p, weights, shifts):
        return (p.roll(x.tanh(), shifts, 1) * weights).sum()

    if compiled:
        torch._dynamo.reset()
        loss = torch.compile(loss, backend="aot_eager", fullgraph=True)
    whole, weights = (
        torch.randn(2, S, 3, generator=torch.Generator().manual_seed(n)) for n in (1, 2)
    )
    for lengths in ([0, 50, S], [0, 120, 130, S]):  # another plan in the second step
        p = plan(AttnSlices.from_cu_seqlens(lengths, causal=True), mesh_of(group), options=OPTIONS)
        alone = whole.clone().requires_grad_()
        (alone.tanh().roll(-2, 1) * weights).sum().backward()
        here = p.shard(whole, 1).requires_grad_()
        loss(here, p, p.shard(weights, 1), -2).backward()
        torch.testing.assert_close(here.grad, p.shard(alone.grad, 1))


def wrong(group):
    p = plan(DOCUMENTS, mesh_of(group), options=OPTIONS)
    with pytest.raises(TypeError, match=r"`shifts` must be an int, got 1\.0"):
        p.roll(torch.zeros(p.seqlen_local), 1.0, 0)
    with pytest.raises(ValueError, match=r"`shifts` must fit in 64 bits, got 9223372036854775808"):
        p.roll(torch.zeros(p.seqlen_local), 1 << 63, 0)
    with pytest.raises(ValueError, match=f"`x` must have the {p.seqlen_local} tokens of this rank"):
        p.roll(torch.zeros(S), 1, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values(ranks_of, size):
    ranks_of(size).run(values)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(ranks_of, compiled):
    ranks_of(2).run(gradients, compiled)


def test_wrong_use(ranks_of):
    ranks_of(2).run(wrong)
