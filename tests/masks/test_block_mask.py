"""BlockMask to slices, by mask_mod and by block lists."""

import re

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    noop_mask,
)

import magi_compile
from magi_compile import MaskDataError
from magi_compile.masks import UnsupportedMaskError, slices_from_block_mask
from magi_compile.masks.block_mask import convert_mask_mod
from tests.masks.support.helpers import dense_mask, packed
from tests.masks.support.mask_mods import MASK_MODS
from tests.programs.random_functions import same_lists

LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]
SIZES = [(1, 64, 64), (2, 129, 129), (2, 50, 77), (2, 77, 50)]


def block_mask_of(mask_mod, batch, seqlen_q, seqlen_k, block=(16, 32), heads=None):
    return create_block_mask(
        mask_mod, batch, heads, seqlen_q, seqlen_k, device="cpu", BLOCK_SIZE=block
    )


def raw(mask, **changes):
    """The same block lists without a mask_mod."""
    lists = {
        "kv_num_blocks": mask.kv_num_blocks,
        "kv_indices": mask.kv_indices,
        "full_kv_num_blocks": mask.full_kv_num_blocks,
        "full_kv_indices": mask.full_kv_indices,
        "BLOCK_SIZE": mask.BLOCK_SIZE,
        "mask_mod": None,
        "seq_lengths": mask.seq_lengths,
    }
    return BlockMask.from_kv_blocks(**{**lists, **changes})


def blocks_of(mask, batch):
    """All keys of all listed blocks, `[batch, seqlen_q, seqlen_k]`."""
    blocks = mask.to_dense()[:, 0].bool().expand(batch, -1, -1)
    rows, keys = mask.BLOCK_SIZE
    blocks = blocks.repeat_interleave(rows, 1).repeat_interleave(keys, 2)
    return blocks[:, : mask.seq_lengths[0], : mask.seq_lengths[1]]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "name", ["document_per_entry", "images", "window", "nothing", "everything"]
)
def test_with_mask_mod(name, size):
    mask_mod = MASK_MODS[name](*size)
    slices = slices_from_block_mask(block_mask_of(mask_mod, *size))
    assert torch.equal(slices.to_dense(), packed(dense_mask(mask_mod, *size)))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "name", ["document_per_entry", "images", "window", "nothing", "everything"]
)
def test_from_lists(name, size):
    mask = raw(block_mask_of(MASK_MODS[name](*size), *size))
    slices = slices_from_block_mask(mask)
    assert torch.equal(slices.to_dense(), packed(blocks_of(mask, size[0])))
    assert list(slices) == list(slices.normalize())


def test_lists_without_full_blocks():
    mask = raw(
        block_mask_of(MASK_MODS["document"](1, 90, 90), 1, 90, 90),
        full_kv_num_blocks=None,
        full_kv_indices=None,
    )
    assert torch.equal(slices_from_block_mask(mask).to_dense(), blocks_of(mask, 1)[0])


def test_one_entry_serves_any_batch():
    mask = block_mask_of(MASK_MODS["window"](1, 50, 77), 1, 50, 77)
    for block_mask in (mask, raw(mask)):
        one = slices_from_block_mask(block_mask).to_dense()
        three = slices_from_block_mask(block_mask, batch=3)
        assert torch.equal(three.to_dense(), torch.block_diag(*[one.int()] * 3).bool())
    with pytest.raises(
        ValueError, match="`batch` must be 2, the batch size of `block_mask`, got 3"
    ):
        slices_from_block_mask(block_mask_of(noop_mask, 2, 50, 77), batch=3)


def test_heads():
    def per_head(b, h, q, kv):
        return (q >= kv) | (h > 0)

    mask = block_mask_of(per_head, 1, 64, 64, heads=2)
    with pytest.raises(UnsupportedMaskError, match=r"depends on the head \(h\)"):
        slices_from_block_mask(mask)
    with pytest.raises(
        UnsupportedMaskError, match="block lists of `block_mask` differ between heads"
    ):
        slices_from_block_mask(raw(mask))
    same = raw(block_mask_of(MASK_MODS["window"](1, 64, 64), 1, 64, 64, heads=2))
    assert torch.equal(slices_from_block_mask(same).to_dense(), blocks_of(same, 1)[0])


def test_lists_that_contradict_the_mask_mod():
    causal = block_mask_of(lambda b, h, q, kv: q >= kv, 1, 64, 64)
    wider = raw(causal, mask_mod=lambda b, h, q, kv: q + 20 >= kv)
    with pytest.raises(
        ValueError, match="shows keys, but they leave out kv block 1 of q block 0 of"
    ):
        slices_from_block_mask(wider)
    narrower = raw(causal, mask_mod=lambda b, h, q, kv: (q >= kv) & (kv != 3))
    with pytest.raises(
        ValueError, match="hides no key, but it hides some in kv block 0 of q block 2 of batch"
    ):
        slices_from_block_mask(narrower)
    # Blocks that are listed in vain change nothing: FlexAttention applies the mask_mod inside them.
    full = block_mask_of(lambda b, h, q, kv: q >= 0, 1, 64, 64)
    in_vain = raw(
        full,
        kv_num_blocks=full.full_kv_num_blocks,
        kv_indices=full.full_kv_indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        mask_mod=lambda b, h, q, kv: q >= kv,
    )
    assert list(slices_from_block_mask(in_vain)) == [((0, 64), (0, 64), 1)]


def test_wrong_lists():
    mask = block_mask_of(noop_mask, 1, 64, 64)
    far = raw(mask, seq_lengths=(64, 30))
    with pytest.raises(
        MaskDataError, match=r"full_kv_indices` must be in \[0, 1\), but it holds 1"
    ):
        slices_from_block_mask(far)
    many = raw(mask, full_kv_num_blocks=mask.full_kv_num_blocks + 1)
    with pytest.raises(MaskDataError, match="full_kv_num_blocks` must be from 0 to 2, the columns"):
        slices_from_block_mask(many)
    short = raw(mask, seq_lengths=(100, 64))
    with pytest.raises(ValueError, match="kv_num_blocks` must cover 7 q blocks, got 4"):
        slices_from_block_mask(short)


def test_data_are_checked():
    table = torch.tensor([0, 1] * 32)
    mask = block_mask_of(lambda b, h, q, kv: table[q] == table[kv], 1, 64, 64)
    with pytest.raises(
        ValueError, match=r"`table\[kv\]` must hold equal values next to each other"
    ):
        slices_from_block_mask(mask)


# The way back


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "name", ["document_per_entry", "images", "window", "nothing", "everything"]
)
def test_created_masks_equal_those_of_pytorch(name, size):
    mask_mod = MASK_MODS[name](*size)
    ours = magi_compile.create_block_mask(mask_mod, size[0], 2, *size[1:], "cpu", (16, 32))
    theirs = block_mask_of(mask_mod, *size, heads=2)
    for field in LISTS:
        if getattr(theirs, field) is None:
            assert getattr(ours, field) is None
        else:
            assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(slices_from_block_mask(ours).to_dense(), packed(dense_mask(mask_mod, *size)))


def test_creating_inside_a_graph_is_left_to_pytorch():
    def sparsity(x):
        mask = magi_compile.create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, 64, 64, "cpu", 16
        )
        return x + mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()

    torch._dynamo.reset()
    compiled = torch.compile(sparsity, backend="eager", fullgraph=True)
    assert int(compiled(torch.zeros(()))) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, None, 8, 8, "cpu"), "`B` must be an int and at least 1, got 0"),
        ((None, 0, 8, 8, "cpu"), "`H` must be an int and at least 1, got 0"),
        ((None, None, 0, 8, "cpu"), "`Q_LEN` must be an int and at least 1, got 0"),
        ((None, None, 8, 0, "cpu"), "`KV_LEN` must be an int and at least 1, got 0"),
        (
            (None, None, 8, 8, "cpu", (4, 0)),
            r"`BLOCK_SIZE` must be an int and at least 1, got \(4, 0\)",
        ),
        ((None, None, 8.5, 8, "cpu"), r"`Q_LEN` must be an int and at least 1, got 8\.5"),
    ],
)
def test_wrong_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        magi_compile.create_block_mask(noop_mask, *arguments)


@pytest.mark.parametrize("block_size", [128, (64, 48)], ids=str)
def test_masks_that_intervals_can_not_express(block_size):
    """Data in no order, a mask for each head, a table of rows and keys: the lists are PyTorch's."""
    table = torch.tensor([0, 1, 2] * 100)
    pairs = torch.rand(300, 300, generator=torch.Generator().manual_seed(0)) < 0.001

    def unordered(b, h, q, kv):
        return (table[q] == table[kv]) & (q >= kv)

    def by_head(b, h, q, kv):
        return pairs[q, kv] | ((q >= kv) & (kv < 90 * h))

    def of_pairs(b, h, q, kv):
        return pairs[q, kv] | ((q < 128) & (kv < 128))

    for mask_mod in (unordered, by_head, of_pairs):
        arguments = (mask_mod, 2, 3, 300, 290, "cpu", block_size)
        ours, theirs = (f(*arguments) for f in (magi_compile.create_block_mask, create_block_mask))
        assert same_lists(ours, theirs) is None


def test_created_masks_check_their_data():
    table = torch.arange(64)
    with pytest.raises(ValueError, match=r"must look up entries in \[-64, 64\)"):
        magi_compile.create_block_mask(
            lambda b, h, q, kv: table[q * 2] == kv, None, None, 64, 64, "cpu"
        )


def test_something_else():
    with pytest.raises(TypeError, match="`block_mask` must be a BlockMask, got int"):
        slices_from_block_mask(3)
    with pytest.raises(TypeError, match="`mask_mod` must be a function of b, h, q and kv, got 3"):
        magi_compile.create_block_mask(3, None, None, 8, 8)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"H": True}, "`H` must be an int and at least 1, got True"),
        ({"KV_LEN": 1 << 30}, r"`KV_LEN` must be below 2\*\*30, got 1073741824"),
        ({"BLOCK_SIZE": 1.5}, r"`BLOCK_SIZE` must be an int and at least 1, got \(1.5, 1.5\)"),
        ({"BLOCK_SIZE": (1, 2, 3)}, r"`BLOCK_SIZE` must be one number or two, got \(1, 2, 3\)"),
    ],
)
def test_sizes_of_the_wrong_kind(sizes, message):
    arguments = {"B": 1, "H": 1, "Q_LEN": 9, "KV_LEN": 9, "device": "cpu"} | sizes
    with pytest.raises(ValueError, match=message):
        magi_compile.create_block_mask(lambda b, h, q, kv: q >= kv, **arguments)


@pytest.mark.parametrize("kind", ["causal", "documents", "everything", "nothing"])
def test_a_mask_mod_of_tensors_on_the_cpu_needs_no_gpu(kind):
    """b, h, q and kv are on a GPU, which this machine need not have."""
    document = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 50, 30]))
    mask_mod = {
        "causal": lambda b, h, q, kv: q >= kv,
        "documents": lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv),
        "everything": lambda b, h, q, kv: q >= 0,
        "nothing": lambda b, h, q, kv: q < 0,
    }[kind]
    slices = convert_mask_mod(mask_mod, 100, 100, torch.device("cuda")).slices
    assert slices.q_ranges.device.type == "cpu"
    dense = create_mask(mask_mod, 1, 1, 100, 100, device="cpu")[0, 0]
    assert torch.equal(slices.to_dense(), dense)


UNREADABLE = "`mask_mod` must be a function of tensors that PyTorch can evaluate for all pairs at once, but: "
BRANCH = "` needs its value: a mask_mod cannot branch on its arguments"


@pytest.mark.parametrize(
    ("mask_mod", "error", "message"),
    [
        (lambda b, h, q, kv: q >= kv if q > 5 else q < kv,
         UnsupportedMaskError, UNREADABLE + "`bool` of `(q > 5)" + BRANCH),
        (lambda b, h, q, kv: q >= kv and q > 3, UnsupportedMaskError, UNREADABLE + "`bool` of `(q >= kv)" + BRANCH),
        (lambda b, h, q, kv: q.item() >= kv, UnsupportedMaskError, UNREADABLE + "`item` of `q" + BRANCH),
        (lambda b, h, q, kv: torch.rand(()) > 0.5, UnsupportedMaskError, UNREADABLE + "`rand` is random"),
        (lambda b, h, q, kv: None, TypeError, "`mask_mod` must return a bool tensor, got None"),
        (lambda b, h, q, kv: 1.0, TypeError, "`mask_mod` must return a bool tensor, got a float"),
        (lambda b, h, q, kv: torch.where(q >= kv, 0.0, -torch.inf), TypeError,
         "`mask_mod` must return a bool tensor, got one of torch.float32; return the condition itself"),
        (lambda b, h, q, kv: (q >= kv)[None].expand(2), ValueError, "`mask_mod` must return one value for a "
         "query and a key, got a tensor of shape [2]"),
    ],
)  # fmt: skip
def test_mask_mods_that_nothing_can_evaluate(mask_mod, error, message):
    with pytest.raises(error, match=re.escape(message)):
        magi_compile.create_block_mask(mask_mod, None, None, 32, 32, device="cpu")
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    lists = (one, one[..., None] * 0)
    mask = BlockMask.from_kv_blocks(*lists, mask_mod=mask_mod, seq_lengths=(32, 32))
    x = torch.randn(1, 1, 32, 8)
    with pytest.raises(error, match=re.escape(message)):
        magi_compile.flex_attention(x, x, x, block_mask=mask)


@pytest.mark.parametrize(
    "mask_mod_of",
    [lambda t: lambda b, h, q, kv: t[kv] > 0, lambda t: lambda b, h, q, kv: t[q // 60 + 1] >= kv],
    ids=["keys", "computed"],
)
def test_a_table_that_is_too_short(mask_mod_of):
    mask_mod = mask_mod_of(torch.zeros(3))
    with pytest.raises(
        MaskDataError, match=r"look up t at indices in \[-3, 3\), but it looks up 3"
    ):
        magi_compile.create_block_mask(mask_mod, None, None, 150, 150, device="cpu")
    mask_mod = mask_mod_of(torch.zeros(0))
    with pytest.raises(MaskDataError, match=r"tensors that have entries, t has shape \[0\]"):
        magi_compile.create_block_mask(mask_mod, None, None, 150, 150, device="cpu")
