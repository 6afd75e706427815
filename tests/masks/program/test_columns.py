"""What expressions cannot say: computed in the mask_mod's own graph where it depends on rows or keys alone,
else refused."""

import functools
import math

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import magi_compile
from magi_compile.lowering.backend import make_backend
from magi_compile.masks import (
    MaskProgram,
    UnsupportedMaskError,
    create_block_mask,
    row_intervals,
    trace_mask_mod,
)
from magi_compile.masks.evaluation import verify
from magi_compile.masks.expr.expr import FALSE, KV, Expr, build, unsupported
from magi_compile.masks.expr.parse import parse
from tests.masks.support.helpers import dense_mask, dynamo_program

S = 60
document = torch.arange(S).mul(7).div(100, rounding_mode="floor")
row = document[None]
stacked = torch.stack([document, document.flip(0)], 1)
flags = torch.arange(S) % 7 == 0
weights = torch.linspace(-3, 3, S)
bits = (torch.arange(S) // 16).to(torch.int32)
bytes_ = document.to(torch.uint8)
order = torch.arange(S)


def same(values):
    """Causal attention within runs of equal values, which the mask_mod computes from what it is given."""
    return lambda b, h, q, kv: (values(q) == values(kv)) & (q >= kv)


class Bands:
    def __init__(self, width):
        self.edges = torch.arange(S) // width

    def __call__(self, b, h, q, kv):
        return self.edges.view(-1)[q] >= self.edges.view(-1)[kv]


COMPUTED = {
    "squeeze": same(lambda x: row.squeeze(0)[x]),
    "view": same(lambda x: row.view(-1)[x]),
    "reshape": same(lambda x: row.reshape(-1)[x]),
    "flatten": same(lambda x: row.flatten()[x]),
    "expand": same(lambda x: row.expand(2, -1)[1][x]),
    "row": same(lambda x: row[0, :][x]),
    "row and index": same(lambda x: row[0, x]),
    "column": same(lambda x: stacked[:, 1][x]),
    "transpose": same(lambda x: stacked.t()[0][x]),
    "T": same(lambda x: stacked.T[0, x]),
    "flip": same(lambda x: document.flip(0)[x]),
    "cumsum": same(lambda x: flags.cumsum(0)[x]),
    "plus 1": same(lambda x: (document + 1)[x]),
    "clamp": same(lambda x: document.clamp(1, 3)[x]),
    "float": same(lambda x: document.float()[x]),
    "index_select": same(lambda x: document.index_select(0, order)[x]),
    "roll": same(lambda x: document.roll(0)[x]),
    "of batch": lambda b, h, q, kv: row.expand(2, -1)[b][q] == row.expand(2, -1)[b, kv],
    "fmod": same(lambda x: torch.fmod(x // 20, 8)),
    "sign": lambda b, h, q, kv: torch.sign(q - 20) == torch.sign(kv - 20),
    "isin": lambda b, h, q, kv: torch.isin(q, torch.tensor([3, 50])) | (q >= kv),
    "square": lambda b, h, q, kv: torch.square(q) >= torch.square(kv) + 40,
    "power": lambda b, h, q, kv: q**2 - kv**2 <= 100,
    "floor": same(lambda x: torch.floor(x / 17)),
    "round": same(lambda x: torch.round(x / 17)),
    "shift": same(lambda x: x >> 4),
    "or": lambda b, h, q, kv: ((bits[q] | 4) == 5) & (q >= kv),
    "not": lambda b, h, q, kv: (~bits[q] == -2) & (q >= kv),
    "xor": same(lambda x: bits[x] ^ 5),
    "wraps in int8": lambda b, h, q, kv: (q * 9).to(torch.int8) >= kv,
    "wraps in uint8": lambda b, h, q, kv: (bytes_[q] - 2 > 100) | (q >= kv),
    "wraps in int32": lambda b, h, q, kv: (bits[q] * 2**30 > 0) & (q >= kv),
    "floats": lambda b, h, q, kv: weights[q] >= weights[kv],
    "floats and numbers": lambda b, h, q, kv: weights[q] * 10 >= kv - 30,
    "half a step": lambda b, h, q, kv: q - kv <= 2.5,
    "quotient": lambda b, h, q, kv: q / 2 >= kv,
    "sine": lambda b, h, q, kv: (torch.sin(q) > 0) & (q >= kv),
    "sums of bools": lambda b, h, q, kv: ((flags[q] + flags[kv]) >= 1) & (q == kv),
    "partial": functools.partial(lambda b, h, q, kv, t: t.flatten()[q] == t.flatten()[kv], t=row),
    "object": Bands(13),
    "scalar": lambda b, h, q, kv: (document.max() > 3) & (q >= kv),
    "size": lambda b, h, q, kv: kv < document.shape[0] // 2 + q,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_is_exact(name):
    """By both ways from a mask_mod to a program, and through its text."""
    mask_mod = COMPUTED[name]
    expected = dense_mask(mask_mod, 2, S, S)
    sizes = {"batch": 2, "seqlen_q": S, "seqlen_k": S, "device": "cpu"}
    traced = trace_mask_mod(mask_mod)
    program, tables, symbols = dynamo_program(mask_mod, 2, S, S)
    for made in (traced.program, program):
        assert "\n" not in made.text  # Inductor writes it into a comment
        assert MaskProgram.parse(made.text) == made
    for text, captured, ints in (
        (traced.program.text, traced.tables, ()),
        (program.text, tables, symbols),
    ):
        intervals = row_intervals(text, captured, ints, **sizes)
        intervals.check()
        assert torch.equal(intervals.to_dense(), expected)


MIXED = {
    "bits": lambda b, h, q, kv: (bits[q] | bits[kv]) == 3,
    "remainder": lambda b, h, q, kv: torch.fmod(q - kv, 3) == torch.fmod(q - kv, 3),
    "differences": lambda b, h, q, kv: torch.sign(q - kv) - torch.sign(q - kv) < 1,
    "bytes": lambda b, h, q, kv: bytes_[q] - bytes_[kv] >= 0,
    "chosen": lambda b, h, q, kv: torch.where(torch.sign(q - kv) > 0, q > kv, q > kv),
    "both": lambda b, h, q, kv: (torch.sign(q - kv) > 0) & (kv < 0),
    "either": lambda b, h, q, kv: (torch.sign(q - kv) > 0) | (kv >= 0),
    "look-up": lambda b, h, q, kv: document[torch.abs(q - kv).clamp(max=3).bitwise_or(1)] == 0,
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_and_keys_is_refused(name):
    """And never taken for equal to itself, or for what does not matter."""
    with pytest.raises(UnsupportedMaskError):
        trace_mask_mod(MIXED[name])


def test_unsupported_equals_nothing():
    unknown, again = unsupported("a"), unsupported("a")
    assert unknown != again
    for op in ("eq", "sub", "ge"):
        assert build(op, unknown, unknown).reasons == ("a",)
    for op in ("and", "or", "xor"):
        found = build(op, unknown, unknown)
        assert (found.op, found.reasons) == (op, ("a",))
    assert build("and", FALSE, unknown).reasons == ("a",)
    assert Expr("table", (0, build("add", unknown, KV))).reasons == ("a",)


def test_masks_without_data_have_bits_where_intervals_do_not_fit():
    """What would fail in every run is known before the first one, and said."""

    def scattered(b, h, q, kv):
        return torch.isin(kv, torch.tensor([3, 9, 20])) & (q >= kv)

    def scattered_by_arithmetic(b, h, q, kv):
        return (torch.fmod(kv * kv, 5) == 1) & (q >= kv)

    for mask_mod in (scattered, scattered_by_arithmetic):
        ours = create_block_mask(mask_mod, None, None, S, S, device="cpu")
        assert torch.equal(ours.kv_num_blocks, torch.ones(1, 1, 1, dtype=torch.int32))
    x = torch.randn(1, 1, S, 16)
    mask = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        mask_mod=scattered_by_arithmetic,
        seq_lengths=(S, S),
    )
    compiled = torch.compile(flex_attention, backend=make_backend("eager"), fullgraph=True)
    with torch.no_grad():
        ours = compiled(x, x, x, block_mask=mask)
    dense = torch.nn.functional.scaled_dot_product_attention(
        x, x, x, dense_mask(scattered_by_arithmetic, 1, S, S)
    )
    torch.testing.assert_close(ours, dense.nan_to_num(), atol=2e-5, rtol=2e-4)
    (decision,) = magi_compile.lowering_report().lowered[-1:]
    assert "by bit blocks: the keys with" in decision.notes[0]
    assert "must be next to each other" in decision.notes[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_differences_that_wrap_around_are_found(dtype):
    """Where PyTorch wraps around, in one dtype, unbounded integers do not: that has to show."""
    far = torch.tensor([0, 1, torch.iinfo(dtype).max, -3], dtype=dtype)

    def near(b, h, q, kv):
        return (positions[q] - positions[kv] < 3) & (q >= kv)

    positions = torch.arange(4, dtype=dtype)
    program, tables, _ = trace_mask_mod(near)
    sizes = {"batch": 1, "seqlen_q": 4, "seqlen_k": 4, "device": "cpu"}
    intervals = row_intervals(program, tables, **sizes)
    intervals.check()
    assert torch.equal(intervals.to_dense(), dense_mask(near, 1, 4, 4))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        ValueError, match=rf"`positions\[q\] - positions\[kv\]` must not wrap around in {name}"
    ):
        row_intervals(program, [far], **sizes).check()
    assert MaskProgram.parse(program.text) == program
    assert f"{name}(t0[q] - t0[kv])" in program.text
    assert name not in str(program)


@pytest.mark.parametrize("values", [[math.nan, 1.0, -0.0, 0.0, math.inf, -math.inf], [0.5, 1.5]])
@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_floats_compare_as_in_pytorch(op, values):
    """Row by row, whatever the order of the keys: each value with each, also those that are not numbers."""
    compare = getattr(torch, op)
    for left in values:
        one = torch.full((len(values),), left)
        for right in values:
            other = torch.full((len(values),), right, dtype=torch.float64)

            def mask_mod(b, h, q, kv, one=one, other=other):
                return compare(one[q], other[kv])

            program, tables, _ = trace_mask_mod(mask_mod)
            size = {"batch": 1, "seqlen_q": len(values), "seqlen_k": len(values)}
            intervals = row_intervals(program, tables, **size, device="cpu")
            intervals.check()
            assert torch.equal(intervals.to_dense(), dense_mask(mask_mod, 1, *[len(values)] * 2))


# The second opinion


def wrong_program():
    """A program whose expression is not what its mask_mod shows."""
    program, *_ = trace_mask_mod(lambda b, h, q, kv: q >= kv)
    return MaskProgram(parse("q > kv"), (), program.code)


def test_a_wrong_conversion_is_found():
    text = wrong_program().text
    arguments = ([], [], text, 1, 100, 100, 16, torch.device("cpu"), [], [])
    with pytest.raises(
        magi_compile.MaskDataError, match=r"a bug of ours.*the mask_mod shows what its slices hide"
    ):
        torch.ops.magi.mask_slices(*arguments, True)
    wider = MaskProgram(parse("q + 1 >= kv"), (), wrong_program().code).text
    arguments = ([], [], wider, 2, 100, 100, 16, torch.device("cpu"), [], [])
    with pytest.raises(magi_compile.MaskDataError, match="the mask_mod hides what its slices show"):
        torch.ops.magi.mask_slices(*arguments, False)
    with pytest.raises(magi_compile.MaskDataError, match="hides"):
        torch.ops.magi.mask_slices(*arguments, False)  # once more, until it passes
    verify.remember(wider)
    torch.ops.magi.mask_slices(*arguments, False)
    with pytest.raises(magi_compile.MaskDataError, match="hides"):
        torch.ops.magi.mask_slices(*arguments, True)


def test_a_wrong_conversion_is_found_in_eager_code(monkeypatch):
    from magi_compile.masks import block_mask
    from magi_compile.masks.program.read import TracedMask

    monkeypatch.setattr(block_mask, "read_mask_mod", lambda *_: TracedMask(wrong_program(), [], []))
    with pytest.raises(
        magi_compile.MaskDataError, match=r"`q > kv` exactly.*b = 0, q = (\d+), kv = \1 "
    ):
        create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 100, 100, device="cpu")


def test_documents_do_not_leak():
    """Views of a captured tensor inside the mask_mod, the BlockMask made in the graph."""
    from torch.nn.attention.flex_attention import create_block_mask as pytorch_create_block_mask

    def attend(x, doc):
        def mask_mod(b, h, q, kv):
            return (doc.squeeze(0)[q] == doc.squeeze(0)[kv]) & (q >= kv)

        mask = pytorch_create_block_mask(mask_mod, None, None, S, S, device="cpu")
        return flex_attention(x, x, x, block_mask=mask)

    options = {"magi.strict": True, "magi.verify": True}
    compiled = torch.compile(attend, backend="magi", fullgraph=True, options=options)
    x = torch.randn(1, 2, S, 16)
    for doc in (row, row.flip(1), torch.zeros_like(row)):
        dense = (doc[0][:, None] == doc[0]) & torch.ones(S, S).tril().bool()
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, dense)
        torch.testing.assert_close(compiled(x, doc), expected)


def test_dynamic_sizes_and_ints_are_no_constants():
    """What a graph computes from them follows them, in the graph that was compiled first."""
    from torch.nn.attention.flex_attention import create_block_mask as pytorch_create_block_mask

    def attend(x, doc, width):
        def mask_mod(b, h, q, kv):
            return (q - kv < width * 2 - 1) & (kv < doc.size(0) // 2 + q) & (q >= kv - doc.numel())

        length = x.shape[2]
        mask = pytorch_create_block_mask(mask_mod, None, None, length, length, device="cpu")
        return flex_attention(x, x, x, block_mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(
        attend, backend=make_backend("aot_eager"), fullgraph=True, dynamic=True
    )
    torch._dynamo.utils.counters.clear()
    for length, size, width in ((60, 40, 9), (90, 20, 3), (50, 30, 17)):
        x, doc = torch.randn(1, 2, length, 16), torch.zeros(size)
        q, kv = torch.arange(length)[:, None], torch.arange(length)
        dense = (q - kv < width * 2 - 1) & (kv < size // 2 + q) & (q >= kv - size)
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, dense)
        torch.testing.assert_close(compiled(x, doc, width), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
