"""Attention sinks across ranks: heads of a DTensor, and tokens that a plan has spread."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import magi_compile
from magi_compile import AttnSlices
from magi_compile.dtensor import plan
from tests.dtensor.test_packing_with_context_parallel import OPTIONS

S, HEADS, KV_HEADS = 64, 4, 2
SLICES = AttnSlices.from_cu_seqlens([0, 23, 41, S], causal=True)


def inputs():
    """q, k, v, the sinks and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((S, HEADS, 8), (S, KV_HEADS, 8), (S, KV_HEADS, 8), (HEADS,), (S, HEADS, 8))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def on_one_process():
    *given, dout = inputs()
    leaves = [x.requires_grad_() for x in given]
    out, lse, _ = magi_compile.flex_flash_attention(*leaves[:3], SLICES, sinks=leaves[3])
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout)


def mesh_of(group, name):
    return DeviceMesh("cpu", range(group.size()), mesh_dim_names=(name,))


def run_heads(group, sink_placement):
    mesh = mesh_of(group, "tp")
    out, lse, grads = on_one_process()
    *qkv, sinks, dout = inputs()
    leaves = [distribute_tensor(x, mesh, [Shard(1)]) for x in qkv]
    leaves.append(distribute_tensor(sinks, mesh, [sink_placement]))
    leaves = [x.requires_grad_() for x in leaves]
    found = magi_compile.flex_flash_attention(*leaves[:3], SLICES, sinks=leaves[3])
    assert found.out.placements == (Shard(1),)
    given = torch.autograd.grad(found.out, leaves, distribute_tensor(dout, mesh, [Shard(1)]))
    for x, y in zip((*found[:2], *given), (out, lse, *grads), strict=True):
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sink_placement", [Shard(0), Replicate()], ids=str)
def test_heads(ranks_of, sink_placement):
    ranks_of(2).run(run_heads, sink_placement)


def run_tokens(group, heads_first):
    out, lse, grads = on_one_process()
    p = plan(SLICES, mesh_of(group, "cp"), options=OPTIONS)
    *qkv, sinks, dout = inputs()

    def local(x):
        x = p.shard(x, 0)
        return x.transpose(0, 1)[None] if heads_first else x

    def whole(x):
        return p.unshard(x[0].transpose(0, 1) if heads_first else x, 0)

    leaves = [local(x).clone().requires_grad_() for x in qkv] + [sinks.requires_grad_()]
    found, found_lse = p.attention(*leaves[:3], sinks=leaves[3], return_lse=True)
    *of_rows, of_sinks = torch.autograd.grad(found, leaves, local(dout))
    dist.all_reduce(of_sinks, group=group)
    for x, y in zip((found, *of_rows), (out, *grads), strict=False):
        torch.testing.assert_close(whole(x), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of_sinks, grads[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(p.unshard(found_lse.reshape(HEADS, -1), 1), lse)


@pytest.mark.parametrize("heads_first", [False, True])
def test_tokens(ranks_of, heads_first):
    ranks_of(2).run(run_tokens, heads_first)
