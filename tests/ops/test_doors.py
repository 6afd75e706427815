"""Arguments at every door: eager functions, compiled functions, and the ops themselves."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import magi_compile
from magi_compile import AttnSlices, flex_attention, flex_flash_attention, make_backend

SEQLEN = 64


def causal_mask(batch=None, heads=None, seqlen=SEQLEN):
    return create_block_mask(
        lambda b, h, q, kv: q >= kv, batch, heads, seqlen, seqlen, device="cpu"
    )


def attention_at(door, **options):
    torch._dynamo.reset()
    if door == "eager":
        return flex_attention
    backend = "inductor" if door == "enabled" else make_backend(door)
    return torch.compile(torch_flex_attention, backend=backend, **options)


def of(batch=2, heads=2, seqlen=8, head_dim=8):
    return torch.randn(batch, heads, seqlen, head_dim)


MISFITS = {
    "longer v": (lambda: (of(), of(), of(seqlen=16)), r"`value` must have the heads and length of "
     r"`key`, \[2, 8\], got \[2, 16\]"),
    "shorter v": (lambda: (of(), of(), of(seqlen=4)), r"`value` must have the heads and length of "
     r"`key`, \[2, 8\], got \[2, 4\]"),
    "heads of v": (lambda: (of(heads=4), of(), of(heads=4)), r"`value` must have the heads and "
     r"length of `key`, \[2, 8\], got \[4, 8\]"),
    "batch of v": (lambda: (of(), of(), of(batch=1)), "`value` must have the batch size of `key`, 2, got 1"),
    "batch of k": (lambda: (of(3), of(2), of(2)), "`key` must have the batch size of `query`, 3, or 1, got 2"),
}  # fmt: skip


@pytest.mark.parametrize("door", ["eager", "aot_eager", "enabled"])
@pytest.mark.parametrize("name", MISFITS)
def test_shapes_that_do_not_fit(name, door):
    make, message = MISFITS[name]
    q, k, v = make()
    mask = causal_mask(q.shape[0], seqlen=8)
    attend = attention_at(door)
    with magi_compile.enabled(), pytest.raises(ValueError, match=message):
        attend(q, k, v, block_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("door", ["eager", "aot_eager"])
def test_block_mask_of_other_heads(door):
    x = of(heads=4, seqlen=SEQLEN)
    with pytest.raises(ValueError, match="`block_mask` must have heads 1 or 4, got 2"):
        attention_at(door)(x, x, x, block_mask=causal_mask(heads=2))


def test_keys_of_one_entry_without_a_mask_of_all():
    q, k = of(3, seqlen=SEQLEN), of(1, seqlen=SEQLEN)
    for mask, found in ((None, None), (causal_mask(), 1)):
        message = f"`block_mask` must be made for the batch size of `query`, 3, .* got {found}"
        with pytest.raises(ValueError, match=message):
            flex_attention(q, k, k, block_mask=mask)


def test_another_length_of_v_in_a_later_call():
    attend = attention_at("aot_eager", dynamic=True)
    for seqlen in (8, 12):
        attend(of(seqlen=seqlen), of(seqlen=seqlen), of(seqlen=seqlen))
    with pytest.raises(ValueError, match="`value` must have the heads and length"):
        attend(of(seqlen=12), of(seqlen=12), of(seqlen=14))


def test_ops_refuse_tensors_that_do_not_fit():
    q, slices = torch.randn(16, 2, 8), AttnSlices.causal(16)
    lists = [slices.q_ranges, slices.k_ranges, slices.mask_types]
    options = (lists, [], 0.3, 0.0, "")
    ops = torch.ops.magi
    for v, message in (
        (torch.randn(8, 2, 8), "`v` must have the tokens and heads of `k`"),
        (q.half(), "`v` must have the dtype of `q`"),
        (q[0], "`v` must be"),
        (q.to("meta"), "`v` must be on the device of `q`"),
    ):
        for op in (ops.attention, ops.ffa_fwd):
            with pytest.raises(ValueError, match=message):
                op(q, q, v, *options)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, q, torch.randn(8, 2, 8))]
        fake_lists = [mode.from_tensor(x) for x in lists]
        with pytest.raises(ValueError, match="`v` must have the tokens"):
            ops.ffa_fwd(*fakes, fake_lists, [], 0.3, 0.0, "")
    out, lse, _ = ops.ffa_fwd(q, q, q, *options)
    with pytest.raises(ValueError, match=r"`dout` must have shape \[16, 2, 8\], got \[8, 2, 8\]"):
        ops.ffa_bwd(out[:8], None, q, q, q, out, lse, *options, False)


@pytest.mark.parametrize("door", ["eager", "aot_eager", "inductor"])
def test_written_output(door):
    """PyTorch's error, as for plain FlexAttention: never other gradients."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, SEQLEN, 16).unbind())
    attend = attention_at(door)
    for write in (lambda out: out.mul_(2.0), lambda out: out.transpose(1, 2).mul_(2.0)):
        for score_mod in (None, lambda score, b, h, q, kv: score + 0.1 * (kv - q)):
            out = attend(q, k, v, score_mod, block_mask=causal_mask())
            found = torch.autograd.grad(out.square().sum(), q, retain_graph=True)
            expected = flex_attention(q, k, v, score_mod, causal_mask())
            torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), q))

            def step(out=out, write=write):
                write(out)
                torch.autograd.grad(out.square().sum(), (q, k, v))

            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                step()


@pytest.mark.parametrize("door", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_autocast_casts_all_three(door, dtypes):
    q, k, v = torch.randn(3, 1, 2, SEQLEN, 16)
    low = [x.bfloat16() for x in (q, k, v)]
    expected = flex_attention(*low, block_mask=causal_mask())
    q, k, v = q.to(dtypes[0]), k, v.to(dtypes[1])
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_at(door)(q, k, v, block_mask=causal_mask())
        flat = [x[0].transpose(0, 1) for x in (q, k, v)]
        packed = flex_flash_attention(*flat, AttnSlices.causal(SEQLEN)).out
    assert out.dtype == packed.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(packed.transpose(0, 1)[None], expected)


def test_transforms_of_torch_func():
    x, slices = torch.randn(SEQLEN, 2, 8), AttnSlices.causal(SEQLEN)

    def attend(q):
        return flex_flash_attention(q, x, x, slices).out.sum()

    for run in (torch.func.grad(attend), torch.func.jacrev(attend)):
        with pytest.raises(
            NotImplementedError, match=r"no rules for the transforms of torch\.func"
        ):
            run(x)
    with pytest.raises(NotImplementedError, match="make the mapped dimension part of the batch"):
        torch.func.vmap(attend)(x[None])
    of_other = torch.func.grad(lambda w: w * attend(x))(torch.tensor(2.0))
    torch.testing.assert_close(of_other, attend(x))


def test_tensors_without_values():
    x, mask = torch.randn(1, 2, SEQLEN, 8), causal_mask()
    message = "`query` must have values.*torch.compile or torch.export"
    with FakeTensorMode() as mode, pytest.raises(NotImplementedError, match=message):
        flex_attention(*[mode.from_tensor(x)] * 3, block_mask=mask)
    with pytest.raises(NotImplementedError, match=message):
        flex_attention(*[x.to("meta")] * 3)


def test_export_without_dynamo():
    class Model(torch.nn.Module):
        def forward(self, x):
            return flex_attention(x, x, x, block_mask=mask)

    x, mask = torch.randn(1, 2, SEQLEN, 16), causal_mask()
    exported = torch.export.export(Model(), (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), Model()(x))


@pytest.mark.parametrize(
    ("option", "part"), [("magi.strickt", "magi.strickt"), ("magi.kernel", "cdua")]
)
def test_options_with_a_typo(option, part):
    x = of(seqlen=SEQLEN)
    torch._dynamo.reset()
    attend = torch.compile(torch_flex_attention, backend="magi", options={option: "cdua"})
    with pytest.raises(ValueError, match=part) as found:
        attend(x, x, x, block_mask=causal_mask())
    assert type(found.value).__name__ == "ValueError"
    assert "bug" not in str(found.value)


def test_list_of_slices():
    x = torch.randn(8, 2, 8)
    with pytest.raises(
        TypeError, match=r"must be AttnSlices, got list; make them with AttnSlices\.from_lists"
    ):
        flex_flash_attention(x, x, x, [[0, 8]])


@pytest.mark.parametrize("door", ["eager", "aot_eager"])
@pytest.mark.parametrize("by_head", [False, True])
def test_keys_of_one_entry(door, by_head):
    lengths = torch.tensor([SEQLEN, 40, 50])

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (kv < lengths[b]) & (q - kv < 30 * (h + 1) if by_head else q >= 0)

    def with_b(score, b, h, q, kv):
        return score + 0.05 * b * (kv - q)

    mask = create_block_mask(mask_mod, 3, 2 if by_head else None, SEQLEN, SEQLEN, device="cpu")
    q, k, v = (of(batch, seqlen=SEQLEN).requires_grad_() for batch in (3, 1, 1))
    for score_mod in (None, with_b):
        found = attention_at(door)(q, k, v, score_mod, mask)
        expected = flex_attention(
            q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), score_mod, mask
        )
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected)]
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("door", ["packed", "inductor"])
def test_messages_have_numbers_for_symbolic_sizes(door):
    torch._dynamo.reset()
    with magi_compile.enabled():
        if door == "packed":
            attend = torch.compile(flex_flash_attention, backend="aot_eager", dynamic=True)
            q, v = torch.randn(64, 2, 8), torch.randn(49, 2, 8)
            with pytest.raises(ValueError, match=r"`v` must have the .*, \[64, 2\], got \[49, 2\]"):
                attend(q, q, v, AttnSlices.causal(64))
        else:
            attend = torch.compile(torch_flex_attention, dynamic=True)
            q, v = of(seqlen=64), of(seqlen=49)
            with pytest.raises(ValueError, match=r"`value` must have .*, \[2, 64\], got \[2, 49\]"):
                attend(q, q, v)


def test_kernel_options_are_a_dict():
    x = of()
    with pytest.raises(TypeError, match="`kernel_options` must be a dict or None, got 'x'"):
        flex_attention(x, x, x, kernel_options="x")
