"""The largest score of each row (QK-clip) across ranks, by every way in which a model may ask for it."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import magi_compile
from magi_compile import AttnSlices
from magi_compile.dtensor import context_parallel, plan
from magi_compile.kernels.reference import exact_max_scores
from tests.dtensor.test_packing_with_context_parallel import OPTIONS
from tests.lowering.test_max_scores import options_of_a_gpu

B, HEADS, KV_HEADS, S, D = 2, 4, 2, 100, 8
SCALE = 0.4
DOCUMENTS = AttnSlices.from_cu_seqlens([0, 23, 61, S], causal=True)
BOTH = AuxRequest(lse=True, max_scores=True)


def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, n, S, D, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS)]


def expected(q, k, scale=SCALE):
    """`[B, HEADS, S]`"""
    entries = zip(q.transpose(1, 2), k.transpose(1, 2), strict=True)
    return torch.stack([exact_max_scores(*x, DOCUMENTS, scale).float() for x in entries])


def document_mask(cu_seqlens):
    document = torch.searchsorted(torch.tensor(cu_seqlens), torch.arange(S), right=True)
    return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)


def by_plan(p, q, k, v):
    return p.attention(q, k, v, scale=SCALE, return_aux=BOTH)


def with_sinks(p, q, k, v):
    """The log-sum-exp has the sinks in it, the largest scores have not."""
    sinks = torch.full((HEADS,), 50.0)
    out, aux = p.attention(q, k, v, scale=SCALE, sinks=sinks, return_aux=BOTH)
    assert (aux.lse >= 50.0).all()
    return out, aux


def packed(p, q, k, v):
    """One entry of the batch after the other."""
    found = [
        p.attention(*(x[i].transpose(0, 1) for x in (q, k, v)), scale=SCALE, return_aux=BOTH)
        for i in range(B)
    ]
    outs, auxes = zip(*found, strict=True)
    return torch.stack(outs).transpose(1, 2), auxes[0]._replace(
        max_scores=torch.stack([aux.max_scores for aux in auxes])
    )


def by_dtensors(p, q, k, v):
    mesh = p.mesh_of_test
    q, k, v = (DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k, v))
    out, aux = p.attention(q, k, v, scale=SCALE, return_aux=BOTH)
    assert aux.max_scores.placements == (Shard(2),)
    return out.to_local(), aux._replace(max_scores=aux.max_scores.to_local())


def run_plan(group, attend):
    mesh = DeviceMesh("cpu", range(group.size()), mesh_dim_names=("cp",))
    p = plan(DOCUMENTS, mesh, options=OPTIONS)
    p.mesh_of_test = mesh
    given = qkv()
    local = [p.shard(x, 2).clone().requires_grad_() for x in given]
    out, aux = attend(p, *local)
    assert (aux.max_scores.dtype, aux.max_scores.requires_grad) == (torch.float32, False)
    torch.testing.assert_close(p.unshard(aux.max_scores, 2), expected(*given[:2]))
    # Gradients are those of a call that asks for nothing.
    grads = torch.autograd.grad(out.sum(), local)
    plain = p.attention(
        *local, scale=SCALE, sinks=torch.full((HEADS,), 50.0) if attend is with_sinks else None
    )
    torch.testing.assert_close(grads, torch.autograd.grad(plain.sum(), local))


@pytest.mark.parametrize("attend", [by_plan, with_sinks, packed, by_dtensors])
def test_attention_of_a_plan(ranks_of, attend):
    ranks_of(2).run(run_plan, attend)


def run_compiled(group, backend, is_distributed):
    torch._dynamo.reset()
    mesh = DeviceMesh("cpu", range(group.size()), mesh_dim_names=("cp",))
    p = plan(DOCUMENTS, mesh, options=OPTIONS)
    given = qkv()
    local = [p.shard(x, 2).clone().requires_grad_() for x in given]
    if is_distributed:
        local = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in local]

    def attend(q, k, v, request):
        out, aux = p.attention(q, k, v, scale=SCALE, return_aux=request)
        return out * 2, aux.max_scores

    attend = torch.compile(attend, backend=backend, fullgraph=True)
    out, max_scores = attend(*local, AuxRequest(max_scores=True))
    assert not max_scores.requires_grad
    if is_distributed:
        assert max_scores.placements == (Shard(2),)
        out, max_scores = out.to_local(), max_scores.to_local()
    torch.testing.assert_close(p.unshard(max_scores, 2), expected(*given[:2]))
    out.sum().backward()


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "magi"])
def test_compiled_attention_of_a_plan(ranks_of, backend, is_distributed):
    ranks_of(2).run(run_compiled, backend, is_distributed)


class ForwardsOf(TorchDispatchMode):
    """Counts forward passes across ranks."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.magi.cp_ffa_fwd.default
        return func(*args, **(kwargs or {}))


def saves_attention(ctx, op, *args, **kwargs):
    is_ours = op is torch.ops.magi.cp_ffa_fwd.default
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


def run_checkpointed(group, policy, expected_count):
    """By our functions, which find their mask in the backward too."""
    mesh = DeviceMesh("cpu", range(group.size()), mesh_dim_names=("cp",))
    mask = flex.create_block_mask(document_mask([0, 23, 61, S]), None, None, S, S, device="cpu")

    def layer(q, k, v):
        out, aux = magi_compile.flex_attention(
            q, k, v, None, mask, SCALE, enable_gqa=True, return_aux=AuxRequest(max_scores=True)
        )
        return out.sin(), aux.max_scores

    options = {}
    if policy is not None:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    with context_parallel(mesh, mask=mask, options=OPTIONS) as p:
        given = qkv()
        local = [p.shard(x, 2).clone().requires_grad_() for x in given]
        with ForwardsOf() as forwards:
            out, max_scores = checkpoint(layer, *local, use_reentrant=False, **options)
            out.sum().backward()
    assert forwards.count == expected_count
    torch.testing.assert_close(p.unshard(max_scores.detach(), 2), expected(*given[:2]))


@pytest.mark.parametrize(
    ("policy", "count"), [(None, 2), (saves_attention, 1)], ids=["all", "selective"]
)
def test_checkpointing(ranks_of, policy, count):
    ranks_of(2).run(run_checkpointed, policy, count)


def run_one_that_asks(group):
    mesh = DeviceMesh("cpu", range(group.size()), mesh_dim_names=("cp",))
    p = plan(DOCUMENTS, mesh, options=OPTIONS)
    local = [p.shard(x, 2).clone().requires_grad_() for x in qkv()]
    request = AuxRequest(lse=True, max_scores=group.rank() == 0)
    out, aux = p.attention(*local, return_aux=request)
    assert (aux.max_scores is not None) == (group.rank() == 0)
    grads = torch.autograd.grad(out.sum(), local)
    plain = p.attention(*local)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(grads, torch.autograd.grad(plain.sum(), local))


def test_one_rank_may_ask_alone(ranks_of):
    ranks_of(2).run(run_one_that_asks)


@pytest.mark.parametrize("scale", [-SCALE, 0.0])
def test_scales_that_are_not_positive(ranks_of, scale):
    ranks_of(2).run(run_scale, scale)


def run_scale(group, scale):
    mesh = DeviceMesh("cpu", range(group.size()), mesh_dim_names=("cp",))
    p = plan(DOCUMENTS, mesh, options=OPTIONS)
    given = qkv()
    _, aux = p.attention(*(p.shard(x, 2) for x in given), scale=scale, return_aux=BOTH)
    torch.testing.assert_close(p.unshard(aux.max_scores, 2), expected(*given[:2], scale))


def run_flex(group, way, score_mod):
    mesh = DeviceMesh("cpu", range(group.size()), mesh_dim_names=("cp",))
    mask = flex.create_block_mask(document_mask([0, 23, 61, S]), None, None, S, S, device="cpu")
    attention = magi_compile.flex_attention if way == "ours" else flex.flex_attention

    def attend(q, k, v):
        return attention(
            q, k, v, score_mod, mask, SCALE, enable_gqa=True, return_aux=AuxRequest(max_scores=True)
        )

    with pytest.MonkeyPatch.context() as patch:
        # PyTorch's front refuses the largest scores on a CPU.
        patch.setattr(flex, "_apply_kernel_options", options_of_a_gpu)
        if way == "compiled":
            attend = torch.compile(attend, backend="magi", fullgraph=True)
        with context_parallel(mesh, mask=mask, options=OPTIONS) as p:
            given = qkv()
            local = [p.shard(x, 2).clone().requires_grad_() for x in given]
            out, aux = attend(*local)
            out.sum().backward()
    assert aux.lse is None
    found = p.unshard(aux.max_scores.detach(), 2)
    wanted = expected(*given[:2])
    if score_mod is not None:
        wanted = 0.7 * torch.tanh(wanted / 0.7)
    torch.testing.assert_close(found, wanted)
    assert all(bool(x.grad.isfinite().all()) for x in local)


def softcap(score, b, h, q, kv):
    return 0.7 * torch.tanh(score / 0.7)


@pytest.mark.parametrize(
    ("way", "score_mod"),
    [
        ("ours", None),
        ("ours", softcap),
        ("pytorch", None),
        ("pytorch", softcap),
        ("compiled", None),
    ],
)
def test_flex_attention_in_context_parallel(ranks_of, way, score_mod):
    ranks_of(2).run(run_flex, way, score_mod)


def run_flash(group):
    mesh = DeviceMesh("cpu", range(group.size()), mesh_dim_names=("cp",))
    given = qkv()
    with context_parallel(mesh, mask=DOCUMENTS, options=OPTIONS) as p:
        q, k, v = (p.shard(x[0].transpose(0, 1), 0) for x in given)
        _, _, max_scores = magi_compile.flex_flash_attention(
            q, k, v, p.slices, softmax_scale=SCALE, return_max_scores=True
        )
        _, aux = p.attention(q, k, v, scale=SCALE, return_aux=BOTH)
    assert torch.equal(aux.max_scores, max_scores)
    torch.testing.assert_close(p.unshard(max_scores, 1), expected(*given[:2])[0])


def test_flex_flash_attention_in_context_parallel(ranks_of):
    ranks_of(2).run(run_flash)


def run_refused(group):
    mesh = DeviceMesh("cpu", range(group.size()), mesh_dim_names=("cp",))
    p = plan(DOCUMENTS, mesh, options=OPTIONS)
    local = [p.shard(x, 2) for x in qkv()]
    with pytest.raises(TypeError, match="`return_aux` must be an AuxRequest or None, got True"):
        p.attention(*local, return_aux=True)
    with pytest.raises(ValueError, match="one of `return_lse` and `return_aux` must be left out"):
        p.attention(*local, return_lse=True, return_aux=BOTH)


def test_bad_arguments(ranks_of):
    ranks_of(2).run(run_refused)
