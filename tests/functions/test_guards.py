"""Where PyTorch raises no error for a bad index or a zero divisor, as on a GPU, the mask_mod's data are checked."""

import pytest
import torch

from magi_compile import MaskDataError
from magi_compile.functions import guards
from magi_compile.functions.text import (
    at_points,
    functions,
    in_ops,
    mask_mod_of,
    names_of_captures,
)
from magi_compile.masks.evaluation.bit_blocks import (
    slices_with_bits,
    visible_blocks,
)
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from tests.masks.support.mask_mods import MASK_MODS

CPU = torch.device("cpu")
SIZES = MaskSizes(2, 200, 140, Heads(2, 2))
TABLE = torch.arange(200) % 7
SQUARE = torch.arange(200 * 150).view(200, 150) % 5


@pytest.fixture
def always_guarded(monkeypatch):
    monkeypatch.setattr(guards, "is_needed", lambda device: True)


def mask_of(text, *tables, titles=()):
    """The mask_mod that returns `text`."""
    names = "".join(f", t{i}" for i in range(len(tables)))
    function = functions(f"def mask(b, h, q, kv{names}):\n    return {text}\n")["mask"]
    return mask_mod_of(function, names_of_captures(tables, ()), titles)


RIGHT = {
    "row": ("t0[q] == t0[kv]", TABLE),
    "negative": ("t0[-q - 1] == t0[kv - 140]", TABLE),
    "square": ("t0[q, kv] > 1", SQUARE),
    "of a row": ("t0[q][kv] > 1", SQUARE),
    "mixed": ("(t0[q, 3] == t0[5, kv]) | (t0[-1, kv] > 2)", SQUARE),
    "slice": ("t0[:, kv].sum() > t0[..., q % 150].sum()", SQUARE),
    "new dimension": ("t0[None, q][0] == t0[kv]", TABLE),
    "functions": ("torch.gather(t0, 0, (q % 9)[None])[0] == t0[kv]", TABLE),
    "divisors": ("(q // (kv + 1) > t0[q]) | (kv % (q + 1) == 3) | (7 // (q + 1) > 1)", TABLE),
    "floats": ("(q / kv > 2) & (q.float() // 0.5 > 3)", TABLE),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_stays_the_same(name, monkeypatch):
    with in_ops():
        wanted = slices_with_bits(mask_of(*RIGHT[name]), SIZES, None, CPU)
        monkeypatch.setattr(guards, "is_needed", lambda device: True)
        found = slices_with_bits(mask_of(*RIGHT[name]), SIZES, None, CPU)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    assert int(wanted.to_dense().sum()) > 0


@pytest.mark.parametrize("name", list(MASK_MODS)[::4])
def test_named_masks_stay_the_same(name, monkeypatch):
    sizes = MaskSizes(2, 130, 97)
    mask_mod = MASK_MODS[name](2, 130, 97)
    with in_ops():
        wanted = slices_with_bits(mask_mod, sizes, None, CPU)
        monkeypatch.setattr(guards, "is_needed", lambda device: True)
        found = slices_with_bits(mask_mod, sizes, None, CPU)
    assert torch.equal(found.to_dense(), wanted.to_dense())


@pytest.mark.parametrize(
    ("text", "table", "message"),
    [
        ("t0[q + kv] == 0", TABLE, r"look up docs at indices in \[-200, 200\), but it looks up 200 at "
         r"q = 73, kv = 127"),
        ("t0[q, kv + 20] == 0", SQUARE, r"look up dimension 1 of docs at indices in \[-150, 150\), but "
         r"it looks up 150 at q = 0, kv = 130"),
        ("t0[q][kv - 160] == 0", SQUARE, r"look up a captured tensor at indices in \[-150, 150\), but "
         r"it looks up -160 at q = 0, kv = 0"),
        ("t0[q - 250] == 0", TABLE, r"in \[-200, 200\), but it looks up -250 at q = 0, kv = 0"),
        ("(q < 5) & (t0[q * 2] == 0)", TABLE, r"looks up 200 at q = 100, kv = 0"),
        ("torch.gather(t0, 0, (q - 1)[None])[0] == 0", TABLE, r"indices in \[0, 200\), but it "
         r"looks up -1 at q = 0, kv = 0"),
        ("t0.index_select(0, q[None])[0] == t0.index_select(0, index=(kv + "
         "99)[None])[0]", TABLE, r"looks up 200 at q = 0, kv = 101"),
        ("t0[torch.stack([q, kv + 90])].sum() == 0", TABLE, r"looks up 200 at q = 0, kv = 110"),
        ("q // (kv - 5) > 0", TABLE, "must not divide by zero, but it divides by 0 at q = 0, kv = 5"),
        ("7 % (kv - 5) > 0", TABLE, "must not divide by zero, but it divides by 0 at q = 0, kv = 5"),
        ("torch.div(kv, q, rounding_mode='floor') > 0", TABLE, "must not divide by zero, but "
         "it divides by 0 at q = 0, kv = 0"),
        ("torch.remainder(kv, q - 3) > 0", TABLE, "must not divide by zero, but it divides by 0 at q = 3, kv = 0"),
    ],
)  # fmt: skip
def test_data_that_mean_nothing(text, table, message, always_guarded):
    with in_ops(), pytest.raises(MaskDataError, match=message):
        slices_with_bits(mask_of(text, table, titles=("docs",)), SIZES, None, CPU)
    with in_ops(), pytest.raises(MaskDataError, match=message):
        visible_blocks(mask_of(text, table, titles=("docs",)), SIZES, 64, 64, CPU)


def test_pairs_that_do_not_exist_do_not_count(always_guarded):
    """Neither sequence fills its last block, and tables have just as many entries."""
    mask_mod = mask_of("t0[q] == t1[kv]", torch.zeros(130).int(), torch.zeros(9).int())
    with in_ops():
        slices = slices_with_bits(mask_mod, MaskSizes(1, 130, 9), None, CPU)
    assert slices.area() == 130 * 9


@pytest.mark.parametrize("text", ["t0[q, 9] > t0[-9, kv]", "t0[3, q // 0] > 1"])
def test_numbers_that_mean_nothing(text, always_guarded):
    """Of those the host knows."""
    message = "the mask_mod must have a value for each query and key, but it raises "
    with in_ops(), pytest.raises(MaskDataError, match=message):
        slices_with_bits(mask_of(text, torch.zeros(4, 4).int()), MaskSizes(1, 4, 4), None, CPU)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t0[q * 3]", r"must look up t0 at indices in \[-9, 9\), but it looks up 9"),
        ("q // t0[q]", "what the mask_mod computes of rows or of keys must not divide by zero, but it does"),
        ("t0[t0 * 2]", r"must look up t0 at indices in \[-9, 9\), but it looks up 16"),
    ],
)  # fmt: skip
def test_columns(text, message, always_guarded):
    function = functions(f"def t1(q, t0):\n    return {text}\n")["t1"]
    captures = names_of_captures([torch.arange(9)], ())
    with pytest.raises(MaskDataError, match=message):
        at_points(function, {"q": torch.arange(9)}, captures)


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["t0[q + kv] == 0", "q // (kv - 5) > t0[q]"])
def test_a_gpu_goes_on(text):
    """The error comes later, and the CUDA context stays healthy."""
    from magi_compile import synchronize_checks

    device = torch.device("cuda")
    with in_ops():
        slices_with_bits(mask_of(text, TABLE.to(device)), SIZES, None, device)
    with pytest.raises(MaskDataError, match=r"at q = "):
        synchronize_checks()
    assert int(torch.ones(5, device=device).sum()) == 5
