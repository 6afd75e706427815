"""Evaluation and training in any order: what a plan keeps serves every mode, whichever one made it."""

from contextlib import nullcontext
from functools import partial
from itertools import count

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import magi_compile
from magi_compile import AttnSlices
from magi_compile.dtensor import (
    ContextParallelOptions,
    context_parallel,
    context_parallel_attention,
    plan,
    plan_rank,
)

S, HEADS = 64, 2
OPTIONS = ContextParallelOptions(chunk_size=8, degree=1, backward_degree=1)
_windows = count(5)

MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "grad": nullcontext,
    "checkpoint": nullcontext,
}
ORDERS = [
    ("inference", "grad"),
    ("inference", "autocast", "grad"),
    ("no_grad", "grad", "inference"),
    ("autocast", "grad"),
    ("grad", "inference", "checkpoint"),
    ("inference", "checkpoint", "grad"),
]


def by_plan(window, group):
    p = plan(AttnSlices.sliding_window(S, S, (window, 0)), group, options=OPTIONS)
    return lambda: nullcontext(p), p.attention


def by_rank_plan(window, group):
    mask = AttnSlices.sliding_window(S, S, (window, 0))
    tensors = plan_rank(mask, group.size(), group.rank(), OPTIONS).tensors("cpu")

    def attend(*qkv):
        out, *_ = context_parallel_attention(*(x[0].transpose(0, 1) for x in qkv), tensors, group)
        return out.transpose(0, 1)[None]

    p = plan(mask, group, options=OPTIONS)
    return lambda: nullcontext(p), attend


def in_block(window, group, is_compiled=False):
    block_mask = create_block_mask(
        lambda b, h, q, kv: (q >= kv) & (q - kv <= window), None, None, S, S, device="cpu"
    )
    flex = torch.compile(flex_attention, backend="aot_eager") if is_compiled else flex_attention
    block = partial(context_parallel, group, mask=block_mask, options=OPTIONS)
    return block, lambda *qkv: flex(*qkv, block_mask=block_mask)


def in_compiled_block(window, group):
    torch._dynamo.reset()
    return in_block(window, group, is_compiled=True)


def run_order(group, door, order):
    """The door is opened in the first mode and used in all of them; gradients are compared with dense attention."""
    window = next(_windows)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 1, HEADS, S, 8, generator=generator)
    distance = torch.arange(S)[:, None] - torch.arange(S)
    is_seen = (distance >= 0) & (distance <= window)
    dense = [x.clone().requires_grad_() for x in whole]
    bias = torch.zeros(S, S).masked_fill(~is_seen, -torch.inf)
    q, k, v = dense
    wanted = (q @ k.mT / 8**0.5 + bias).softmax(-1) @ v
    wanted.square().sum().backward()
    with MODES[order[0]]():
        opened, attend = door(window, group)
    for name in order:
        with MODES[name](), opened() as p:
            qkv = [p.shard(x, dim=2).requires_grad_() for x in whole]
            out = (
                checkpoint(attend, *qkv, use_reentrant=False)
                if name == "checkpoint"
                else attend(*qkv)
            )
            is_rough = name == "autocast"
            assert out.dtype == (torch.bfloat16 if is_rough else torch.float32)
            atol = 0.3 if is_rough else 1e-4
            torch.testing.assert_close(
                out.float(), p.shard(wanted.detach(), dim=2), atol=atol, rtol=atol
            )
            if name in ("inference", "no_grad"):
                continue
            out.float().square().sum().backward()
            for x, y in zip(qkv, dense, strict=True):
                torch.testing.assert_close(x.grad, p.shard(y.grad, dim=2), atol=atol, rtol=atol)


CASES = [
    (door, order, size)
    for number, door in enumerate((by_plan, by_rank_plan, in_block, in_compiled_block))
    for i, order in enumerate(ORDERS)
    for size in (1 + (i + number) % 2,)
]


@pytest.mark.parametrize(
    ("door", "order", "size"),
    CASES,
    ids=["-".join([door.__name__, *order, str(size)]) for door, order, size in CASES],
)
def test_orders_of_modes(ranks_of, door, order, size):
    ranks_of(size).run(run_order, door, order)


def run_mixed(group):
    """Under autocast, q and k of fp32, as rotary embeddings leave them, and v of bf16."""
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, S, S, device="cpu")
    p = plan(mask, group, options=OPTIONS)
    whole = torch.randn(3, 1, HEADS, S, 8, generator=torch.Generator().manual_seed(0))
    wanted = p.shard(scaled_dot_product_attention(*whole, is_causal=True), dim=2)
    q, k, v = (p.shard(x, dim=2) for x in whole)
    packed = [x[0].transpose(0, 1) for x in (q, k, v.bfloat16())]
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16), context_parallel(group, mask=p):
        padded = [
            p.attention(q, k, v.bfloat16()),
            scaled_dot_product_attention(q, k, v.bfloat16(), is_causal=True),
            magi_compile.flex_attention(q, k, v.bfloat16(), block_mask=p.block_mask),
            flex_attention(q, k, v.bfloat16(), block_mask=p.block_mask),
            compiled(q, k, v.bfloat16(), block_mask=p.block_mask),
        ]
        outs = [p.attention(*packed), magi_compile.flex_flash_attention(*packed, p.slices).out]
    for out in [*padded, *(x.transpose(0, 1)[None] for x in outs)]:
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), wanted, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("size", [1, 2])
def test_autocast_of_mixed_dtypes(ranks_of, size):
    ranks_of(size).run(run_mixed)
