"""The door of context parallelism: buffers come back, nothing runs on a rank's tokens alone,
wrong use is told apart."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import flex_attention as flex

import magi_compile
from magi_compile import AttnSlices, dtensor
from magi_compile.dtensor import (
    ContextParallel,
    ContextParallelOptions,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    plan,
)
from tests.dtensor import transformer
from tests.dtensor.test_packing_with_context_parallel import OPTIONS, mesh_of
from tests.dtensor.transformer import block_mask, document_of

S = 128


def test_the_names_of_the_door():
    for name in dtensor.__all__:
        assert getattr(dtensor, name) is not None
    assert set(dtensor.__all__) == set(dtensor._HOMES) <= set(dir(dtensor))
    with pytest.raises(AttributeError, match="has no attribute 'ring'"):
        dtensor.ring  # noqa: B018


def causal(seqlen=S):
    return block_mask("causal", document_of([], seqlen))


def qkv(seqlen, batch=1):
    return [torch.randn(batch, 2, seqlen, 8) for _ in range(3)]


# What is changed in place comes back


def run_restore(group, error):
    mask, lists = causal(), dict(vars(causal()))
    batch = torch.arange(2 * (S + 1)).view(2, S + 1)
    tokens, labels, kept = batch[:, :-1], batch[:, 1:], torch.arange(S)
    before = [x.clone() for x in (batch, tokens, labels)]
    strides, seqlen_local = tokens.stride(), None
    try:
        with context_parallel(
            mesh_of(group),
            mask=mask,
            buffers=[tokens, labels, kept],
            buffer_seq_dims=[1, -1, 0],
            no_restore_buffers={kept},
            options=OPTIONS,
        ) as p:
            seqlen_local = p.seqlen_local
            torch.testing.assert_close(tokens, before[1][:, p.positions])
            torch.testing.assert_close(labels, before[2][:, p.positions])
            torch.testing.assert_close(batch, before[0])  # views of one memory
            assert mask.seq_lengths == (seqlen_local, seqlen_local)
            tokens.zero_()
            if error:
                raise error
    except ZeroDivisionError:
        assert error
    for x, wanted in zip((batch, tokens, labels), before, strict=True):
        torch.testing.assert_close(x, wanted)
    assert tokens.stride() == strides
    assert len(kept) == seqlen_local == S // group.size()
    assert mask.seq_lengths == lists["seq_lengths"] == (S, S)
    assert vars(mask).keys() == lists.keys()
    # Attention is PyTorch's again.
    q, k, v = qkv(S)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=mask), wanted)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex.flex_attention(q.requires_grad_(), k, v, block_mask=mask)


@pytest.mark.parametrize("error", [None, ZeroDivisionError("in the block")])
def test_buffers_come_back(ranks_of, error):
    ranks_of(2).run(run_restore, error)


def run_refused_buffers(group):
    """What is refused changes nothing."""
    mesh, x, other = mesh_of(group), torch.arange(S), torch.arange(S + 1)

    def enter(**arguments):
        with context_parallel(mesh, **{"mask": causal(), "options": OPTIONS, **arguments}):
            raise AssertionError("not refused")

    for arguments, message in [
        ({"buffers": [x]}, "`buffer_seq_dims` must have an entry for each of the 1 buffers, got 0"),
        (
            {"buffers": [x, other], "buffer_seq_dims": [0, 0]},
            "`buffers[1]` must have the 128 tokens of the whole sequence in dimension 0, got 129",
        ),
        (
            {"buffers": [x], "buffer_seq_dims": [1]},
            "`buffer_seq_dims[0]` must be in [-1, 1), the dimensions of its buffer, got 1",
        ),
        (
            {"buffers": [x, x], "buffer_seq_dims": [0, 0]},
            "`buffers[1]` must be a tensor that is not in `buffers` already",
        ),
        (
            {"buffers": [torch.ones(S, requires_grad=True)], "buffer_seq_dims": [0]},
            "`buffers[0]` must not require gradients",
        ),
        ({"no_restore_buffers": [x]}, "`no_restore_buffers` must be a subset of `buffers`"),
        (
            {"mask": None, "buffers": [other], "buffer_seq_dims": [0]},
            "`buffer_padding` must say what padding holds in each of `buffers` (the ignore_index for "
            "labels), because 129 tokens are "
            "padded to 80 on each of 2 ranks",
        ),
        (
            {"buffers": [x], "buffer_seq_dims": [0], "buffer_padding": [0, 0]},
            "`buffer_padding` must have an entry for each of the 1 buffers, got 2",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            enter(**arguments)
        torch.testing.assert_close(x, torch.arange(S))
    with pytest.raises(TypeError, match=r"`buffers\[0\]` must be a tensor, got list"):
        enter(buffers=[[1]], buffer_seq_dims=[0])


def test_buffers_that_do_not_fit(ranks_of):
    ranks_of(2).run(run_refused_buffers)


# Nothing runs on a rank's tokens alone


def run_refused_attention(group):
    mask = causal()
    half = S // 2
    q, k, v = qkv(half)
    whole = qkv(S)
    local = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, half, half, "cpu")
    again = causal()
    with context_parallel(mesh_of(group), mask=mask, options=OPTIONS) as p:
        assert p.seqlen_local == half
        sdpa = F.scaled_dot_product_attention
        flash = magi_compile.flex_flash_attention
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        for error, message, call in [
            (ValueError, "`block_mask` must be the one", lambda: flex.flex_attention(q, k, v)),
            (
                ValueError,
                "`block_mask` must be the one",
                lambda: flex.flex_attention(q, k, v, block_mask=local),
            ),
            (
                (ValueError, RuntimeError),
                "created for a larger length",
                lambda: flex.flex_attention(q, k, v, block_mask=again),
            ),
            (
                ValueError,
                "`block_mask` must be the one",
                lambda: magi_compile.flex_attention(q, k, v, block_mask=local),
            ),
            (
                ValueError,
                "`q` must have the 64 tokens of this rank in dimension 2, got 128",
                lambda: flex.flex_attention(*whole, block_mask=mask),
            ),
            (
                TypeError,
                "`return_aux` must be an AuxRequest or None, got True",
                lambda: magi_compile.flex_attention(q, k, v, block_mask=mask, return_aux=True),
            ),
            (
                ValueError,
                "`slices` must be plan.slices inside",
                lambda: flash(*packed, AttnSlices.causal(half)),
            ),
            (
                NotImplementedError,
                "`kernel` must be None",
                lambda: flash(*packed, p.slices, kernel="cpu"),
            ),
            (ValueError, "without it attention covers all tokens", lambda: sdpa(q, k, v)),
            (
                ValueError,
                "`q` must have the 64 tokens",
                lambda: sdpa(*whole, is_causal=True),
            ),
            (
                ValueError,
                "`attn_mask` must be None",
                lambda: sdpa(q, k, v, attn_mask=torch.ones(half, half).bool()),
            ),
            (
                NotImplementedError,
                "`dropout_p` must be 0.0, got 0.5",
                lambda: sdpa(q, k, v, dropout_p=0.5, is_causal=True),
            ),
            (ValueError, "got shape", lambda: sdpa(q[0], k[0], v[0], is_causal=True)),
            (
                ValueError,
                "set enable_gqa=True",
                lambda: sdpa(q, k[:, :1], v[:, :1], is_causal=True),
            ),
            (
                NotImplementedError,
                "`multi_head_attention_forward` would see only this rank's tokens inside context_parallel",
                lambda: nn.MultiheadAttention(8, 2)(q[0], k[0], v[0]),
            ),
            (
                NotImplementedError,
                "only this rank's tokens inside context_parallel",
                lambda: torch.ops.aten._scaled_dot_product_attention_math(q, k, v),
            ),
            (
                NotImplementedError,
                "only this rank's tokens inside context_parallel",
                lambda: torch.ops.magi.attention(
                    *packed,
                    *(
                        x
                        for x in vars(AttnSlices.causal(half)).values()
                        if isinstance(x, torch.Tensor)
                    ),
                    [],
                    1.0,
                    0.0,
                    "",
                ),
            ),
        ]:
            with pytest.raises(error, match=re.escape(message)):
                call()
    with pytest.raises(
        RuntimeError,
        match="this BlockMask is for tokens that are spread over ranks; call attention inside",
    ):
        flex.flex_attention(q, k, v, block_mask=p.block_mask)


def test_attention_over_the_tokens_of_a_rank_alone_is_refused(ranks_of):
    ranks_of(2).run(run_refused_attention)


def run_without_a_block(group, backend):
    """Ours by a BlockMask that carries its plan, other masks in turn, beside one process."""
    bias = torch.tensor(0.1, requires_grad=True)

    def scored(score, b, h, q, k):
        return score + bias * (q - k)

    def attend(q, k, v, block_mask):
        out, lse = magi_compile.flex_attention(
            q, k, v, scored, block_mask, 0.3, enable_gqa=True, return_lse=True
        )
        return out.sin().sum() + lse.sum()

    torch._dynamo.reset()
    call = torch.compile(attend, backend=backend, fullgraph=True) if backend else attend
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, ends in enumerate(([40], [9, 77], [100])):
            torch.manual_seed(seed)
            whole = [torch.randn(1, h, S, 8, requires_grad=True) for h in (4, 2, 2)]
            mask = block_mask("documents", document_of(ends, S))
            p = plan(mask, mesh_of(group), options=OPTIONS)
            mine = [p.shard(x.detach(), 2).requires_grad_() for x in whole]
            loss = call(*mine, p.block_mask)
            found = torch.autograd.grad(loss, [*mine, bias])
            wanted = attend(*whole, mask)
            torch.testing.assert_close(total(loss.detach(), group), wanted.detach())
            *wanted, of_bias = torch.autograd.grad(wanted, [*whole, bias])
            torch.testing.assert_close(total(found[-1], group), of_bias, rtol=1e-4, atol=1e-3)
            for x, y in zip(found[:-1], wanted, strict=True):
                torch.testing.assert_close(x, p.shard(y, 2), rtol=1e-4, atol=1e-5)


def run_wrong_without_a_block(group):
    q, k, v = qkv(S // 2)
    carried = plan(causal(), mesh_of(group), options=OPTIONS).block_mask
    for error, message, wrong in [
        (TypeError, "`kernel_options` must be a dict or None, got 3", {"kernel_options": 3}),
        (TypeError, "`scale` must be a number, got 'x'", {"scale": "x"}),
        (TypeError, "`score_mod` must be a function or None, got 3", {"score_mod": 3}),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            magi_compile.flex_attention(q, k, v, block_mask=carried, **wrong)


def test_wrong_arguments_beside_a_mask_that_carries_its_plan(ranks_of):
    ranks_of(2).run(run_wrong_without_a_block)


def total(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


@pytest.mark.parametrize("backend", [None, "magi"])
def test_a_mask_carries_its_plan(ranks_of, backend):
    ranks_of(2).run(run_without_a_block, backend)


def run_refused_in_graphs(group):
    """The same in compiled code; where a graph must not break, in an error of Dynamo's that says it."""
    half = S // 2
    q, k, v = qkv(half)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    shorter = AttnSlices.causal(half)
    mask_mod = transformer.mask_mod("causal", None)
    local = flex.create_block_mask(mask_mod, None, None, half, half, "cpu")
    sdpa, flash = F.scaled_dot_product_attention, magi_compile.flex_flash_attention

    def with_block_mask(q, k, v):
        return flex.flex_attention(q, k, v, block_mask=local)

    with context_parallel(mesh_of(group), mask=causal(), options=OPTIONS):
        for fullgraph, message, call, given in [
            (False, "must be the one", with_block_mask, (q, k, v)),
            (True, "must be the one", with_block_mask, (q, k, v)),
            (
                False,
                "without it attention covers all tokens",
                lambda q, k, v: sdpa(q, k, v),
                (q, k, v),
            ),
            (
                True,
                "of this rank",
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                qkv(S),
            ),
            (True, "those of the plan", lambda q, k, v: flash(q, k, v, shorter), packed),
            (
                True,
                "`_scaled_dot_product_attention_math` would see only this rank's tokens",
                lambda q, k, v: torch.ops.aten._scaled_dot_product_attention_math(q, k, v),
                (q, k, v),
            ),
        ]:
            torch._dynamo.reset()
            compiled = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
            error = torch._dynamo.exc.Unsupported if fullgraph else ValueError
            with pytest.raises(error, match=message):
                compiled(*given)


def run_mask_of_another_plan(group, backend):
    """A mask that was kept from an earlier step, of the same lengths."""
    torch._dynamo.reset()
    mesh, (q, k, v) = mesh_of(group), qkv(S // 2)
    flash = magi_compile.flex_flash_attention
    attend = torch.compile(flex.flex_attention, backend=backend) if backend else flex.flex_attention
    old, new = (
        plan(AttnSlices.sliding_window(S, S, (window, 0)), mesh, options=OPTIONS)
        for window in (40, 41)
    )
    again = plan(AttnSlices.sliding_window(S, S, (41, 0)), mesh, options=OPTIONS)
    for around, others in ((old, (new, again)), (new, (old,))):
        with context_parallel(mesh, mask=around):
            attend(q, k, v, block_mask=around.block_mask)
            for other in others:
                with pytest.raises(ValueError, match="of another plan"):
                    attend(q, k, v, block_mask=other.block_mask)
                with pytest.raises(ValueError, match="of another plan"):
                    flash(
                        q[0].transpose(0, 1),
                        k[0].transpose(0, 1),
                        v[0].transpose(0, 1),
                        other.slices,
                    )
            attend(q, k, v, block_mask=around.block_mask)
    with context_parallel(mesh, mask=new):
        attend(q, k, v, block_mask=again.block_mask)  # alike


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_mask_of_another_plan_is_refused(ranks_of, backend):
    ranks_of(2).run(run_mask_of_another_plan, backend)


def test_compiled_it_is_refused_too(ranks_of):
    ranks_of(2).run(run_refused_in_graphs)


def run_inside_and_outside(group):
    """What is compiled outside does not run inside, nor the other way round."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v = qkv(S)
    attend = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        backend="aot_eager",
    )
    wanted = attend(q, k, v)
    for _ in range(2):
        with context_parallel(
            mesh_of(group), mask=AttnSlices.causal(S), options=ContextParallelOptions(chunk_size=S)
        ) as p:
            # With one chunk of all tokens for each rank, local shapes are those of the whole sequence.
            assert p.seqlen_local == S
            local = [p.shard(x, 2) for x in (q, k, v)]
            torch.testing.assert_close(p.unshard(attend(*local), 2), wanted)
        torch.testing.assert_close(attend(q, k, v), wanted)


def test_what_is_compiled_outside_does_not_run_inside(ranks_of):
    ranks_of(2).run(run_inside_and_outside)


# A mask of one entry is that of all entries


def run_masks_of_entries(group):
    """A mask_mod that reads the entry is that of the first; alone in its batch it is right,
    and beside others it is refused."""
    documents = torch.stack([torch.arange(S) // 40, torch.arange(S) // 9])

    def mask_mod(b, h, q, kv):
        return (documents[b, q] == documents[b, kv]) & (q >= kv)

    mask = magi_compile.create_block_mask(mask_mod, 1, None, S, S, device="cpu")
    for given, length in ((mask_mod, S), (mask, None)):
        check_masks_of_entries(
            plan(given, mesh_of(group), seqlen=length, options=OPTIONS), mask, group
        )


def check_masks_of_entries(p, mask, group):
    torch.manual_seed(0)
    q, k, v = qkv(S)
    wanted = magi_compile.flex_attention(q, k, v, block_mask=mask)
    local = [p.shard(x, 2) for x in (q, k, v)]
    torch.testing.assert_close(p.unshard(p.attention(*local), 2), wanted)
    two = [torch.cat([x, x]) for x in local]
    message = r"one batch entry, because the mask_mod of the plan depends on it \(b\), got 2"
    with context_parallel(mesh_of(group), mask=p):
        compiled = torch.compile(flex.flex_attention, backend="aot_eager")
        for attend in (magi_compile.flex_attention, compiled):
            with pytest.raises(Exception, match=message):
                attend(*two, block_mask=p.block_mask)
        with pytest.raises(NotImplementedError, match=message):
            p.attention(*two)


def test_masks_of_entries(ranks_of):
    ranks_of(2).run(run_masks_of_entries)


# Options of attention


def run_options(group):
    torch.manual_seed(0)
    q, k, v = qkv(S, batch=2)
    mask = causal()
    p = plan(mask, mesh_of(group), options=OPTIONS)
    local = [p.shard(x, 2) for x in (q, k, v)]

    def softcapped(score, b, h, q_idx, kv_idx):
        return 5.0 * torch.tanh(score / 5.0)

    wanted, lse = magi_compile.flex_attention(q, k, v, softcapped, mask, scale=0.7, return_lse=True)
    found = [p.attention(*local, scale=0.7, softcap=5.0, return_lse=True)]
    with context_parallel(mesh_of(group), mask=mask, options=OPTIONS):
        aux = flex.AuxRequest(lse=True)
        for attention in (flex.flex_attention, magi_compile.flex_attention):
            out, of_aux = attention(*local, softcapped, mask, scale=0.7, return_aux=aux)
            found.append((out, of_aux.lse))
        compiled = torch.compile(
            lambda q, k, v: flex.flex_attention(q, k, v, softcapped, mask),
            backend="aot_eager",
            fullgraph=True,
        )
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match="`score_mod` must be None in code compiled for"
        ):
            compiled(*local)
        slices = AttnSlices.causal(S)  # alike, in eager code
        packed = [x[0].transpose(0, 1) for x in local]
        alike = magi_compile.flex_flash_attention(*packed, slices).out
    for out, of_lse in found:
        torch.testing.assert_close(p.unshard(out, 2), wanted)
        torch.testing.assert_close(p.unshard(of_lse, 2), lse)
    plain = F.scaled_dot_product_attention(q[:1], k[:1], v[:1], is_causal=True)
    torch.testing.assert_close(p.unshard(alike, 0).transpose(0, 1)[None], plain)
    # The memory order of q, and the dtype of autocast.
    scattered = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in local]
    for given in (local, scattered):
        assert p.attention(*given).stride() == given[0].stride()
    with torch.autocast("cpu", torch.bfloat16):
        assert p.attention(*local).dtype == torch.bfloat16


def test_options_of_attention(ranks_of):
    ranks_of(2).run(run_options)


# The style


class Attention(nn.Module):
    def forward(self, q, k, v, *, block_mask=None):
        if block_mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return flex.flex_attention(q, k, v, block_mask=block_mask)


def run_style(group, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh, whole = mesh_of(group), qkv(S)
    wanted = F.scaled_dot_product_attention(*whole, is_causal=True)
    model = nn.ModuleDict({"attention": Attention()})
    parallelize_module(model, mesh, {"attention": ContextParallel()})
    attend = model["attention"]
    if backend:
        attend = torch.compile(attend, backend=backend, fullgraph=True)
    p = plan(mask := causal(), mesh, options=OPTIONS)
    *local, block = context_parallel_shard(mesh, [*whole, mask], [2, 2, 2, None], p)
    assert mask.seq_lengths == (S, S)
    (out,) = context_parallel_unshard(mesh, [attend(*local, block_mask=block)], [2], p)
    torch.testing.assert_close(out, wanted)
    named = context_parallel_unshard(mesh, {"q": local[0], "k": local[1]}, {"k": 2, "q": 2}, p)
    torch.testing.assert_close(named, {"q": whole[0], "k": whole[1]})
    if backend is None:
        with pytest.raises(NotImplementedError, match="without a plan"):
            attend(*local)
        with pytest.raises(ValueError, match="`block_mask` must be the one"):
            attend(*whole, block_mask=mask)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_style(ranks_of, backend):
    ranks_of(2).run(run_style, backend)


# Plans


def run_refused_plans(group):
    mesh = mesh_of(group)
    two = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "cp"))
    assert plan(causal(), two["cp"]).cp_size == 2
    assert plan(causal(), group).cp_size == 2
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert plan(None, mesh, seqlen=S).is_causal
    assert plan(transformer.mask_mod("causal", None), mesh, seqlen=S).is_causal
    torch.testing.assert_close(torch.rand(3), expected)  # planning draws none
    p = plan(AttnSlices.full(S), mesh, options=OPTIONS)
    assert p.is_full
    assert not p.is_causal
    per_entry = flex.create_block_mask(lambda b, h, q, kv: q >= kv, 2, None, S, S, "cpu")
    assert plan(per_entry, mesh).is_causal  # entries have the same mask
    for error, message, arguments, keywords in [
        (TypeError, "`mesh` must be a DeviceMesh or a process group", (causal(), "cp"), {}),
        (
            ValueError,
            "`mesh` must have one dimension, the ranks that share a sequence, got 2 (dp,cp); take one "
            "of them, mesh['cp']",
            (causal(), two),
            {},
        ),
        (
            TypeError,
            "`mask` must be a BlockMask, AttnSlices, a mask_mod or None, got int",
            (3, mesh),
            {},
        ),
        (
            ValueError,
            "`seqlen` must be given where `mask` is a mask_mod",
            (lambda b, h, q, kv: q >= kv, mesh),
            {},
        ),
        (ValueError, "`seqlen` must be given where `mask` is None (causal)", (None, mesh), {}),
        (
            ValueError,
            "`seqlen` must be the length of `mask`, 128, got 64",
            (causal(), mesh),
            {"seqlen": 64},
        ),
        (ValueError, "`seqlen` must be at least 1, got 0", (None, mesh), {"seqlen": 0}),
        (
            ValueError,
            "must cover the whole sequence, got the mask of a plan",
            (p.block_mask, mesh),
            {},
        ),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            plan(*arguments, **keywords)
    x = torch.zeros(S)
    for message, call in [
        (
            "`x` must have the 128 tokens of the whole sequence in dimension 0, got 64",
            lambda: p.shard(x[:64], 0),
        ),
        (
            "`x` must have the 64 tokens of this rank in dimension 0, got 128",
            lambda: p.unshard(x, 0),
        ),
        ("`tokens` must have the 128 tokens", lambda: p.labels(x[:64])),
        ("`tokens` must be integers, got dtype torch.float32", lambda: p.labels(x)),
        ("`documents` must have the 128 tokens", lambda: p.labels(x.long(), documents=x[:64])),
        ("`dim` must be in [-1, 1) for `x`, got 2", lambda: p.shard(x, 2)),
        ("like `q`, got shape [1, 2]", lambda: p.attention(x[None, :2], x, x)),
        (
            "`k` must have the batch size of `q`, 2, got 1",
            lambda: p.attention(*qkv(64, 2)[:1], *qkv(64)[:2]),
        ),
        (
            "`plan` must be given, because `buffers` holds no BlockMask",
            lambda: context_parallel_shard(mesh, [x], [0]),
        ),
        (
            "`seq_dims` must have an entry for each",
            lambda: context_parallel_shard(mesh, [x], [], p),
        ),
        (
            "`seq_dims` must have an entry for each",
            lambda: context_parallel_unshard(mesh, [x], [], p),
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match="`plan` must be a SequencePlan, got NoneType"):
        context_parallel_unshard(mesh, [x], [0], None)
    for call in (context_parallel_shard, context_parallel_unshard):
        with pytest.raises(ValueError, match=r"`seq_dims` must have an entry .* none for \['q'\]"):
            call(mesh, {"q": x}, {"k": 0}, p)
        with pytest.raises(ValueError, match="for each of the 1 buffers, got 2"):
            call(mesh, [x], [0, 0], p)
    with pytest.raises(ValueError, match="`padding` must have an entry for each of the 1 buffers"):
        context_parallel_shard(mesh, [x], [0], p, padding=[])
    with pytest.raises(TypeError, match="`q` must be a tensor, got list"):
        p.attention([1.0], x, x)
    with pytest.raises(TypeError, match="`dim` must be an int for `x`, got '0'"):
        p.shard(x, "0")


def test_plans_that_can_not_be_made(ranks_of):
    ranks_of(2).run(run_refused_plans)


def run_different_masks(group):
    mask = AttnSlices.sliding_window(S, S, (17 + group.rank(), 0))
    with (
        context_parallel(mesh_of(group), mask=mask, options=OPTIONS) as p,
        pytest.raises(ValueError, match="every rank must plan the same mask") as raised,
    ):
        p.attention(*qkv(p.seqlen_local))
    return str(raised.value)


def test_ranks_with_different_masks(ranks_of):
    first, second = ranks_of(2).run(run_different_masks)
    assert first == second
