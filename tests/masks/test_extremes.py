"""Values at the ends of dtypes, and what is no number: exact, or refused, and never an exception of arithmetic."""

import pytest
import torch

import magi_compile
from magi_compile.masks import (
    UnsupportedMaskError,
    row_intervals,
    slices_from_block_mask,
    trace_mask_mod,
)
from magi_compile.masks.block_mask import one_block_mask
from tests.masks.support.helpers import dense_mask

S = 37
M = 2**63 - 1


def limits(value, dtype=torch.int64):
    """18 for every row but one."""
    table = torch.full((S,), 18, dtype=dtype)
    table[7] = value
    return table


most, least, nan = limits(M), limits(-M - 1), limits(float("nan"), torch.float32)
length = torch.tensor([M])


def in_place(b, h, q, kv):
    x = q
    x += 3
    return (x >= kv) & (q < 8)


def in_place_through_a_view(b, h, q, kv):
    x = q.view(())
    x += 3
    return (x >= kv) & (q < 8)


def in_place_once(b, h, q, kv):
    x = (q // 4).to(torch.int32)
    x *= 3
    mask = x >= kv
    mask &= q > 3
    mask.logical_or_(kv == q)
    return mask


EXACT = {
    "in place": in_place,
    "in place, once": in_place_once,
    "in place, through a view": in_place_through_a_view,
    "at most": lambda b, h, q, kv: (q >= kv) & (kv <= most[q]),
    "distance": lambda b, h, q, kv: (q - kv).abs() <= most[q],
    "above": lambda b, h, q, kv: kv > most[q],
    "of an entry": lambda b, h, q, kv: kv <= length[b],
    "blocks": lambda b, h, q, kv: kv // 2 <= most[q],
    "least": lambda b, h, q, kv: q - kv >= least[q],
    "numbers": lambda b, h, q, kv: (q - kv > -M) & (kv - q < M) & (kv <= M),
    "sum of numbers": lambda b, h, q, kv: (q < kv + b - M) | (q - M > kv + 128) | (q == kv),
    "beyond 64 bits": lambda b, h, q, kv: ((q - kv) // 4 <= -(2**63)) ^ (q >= kv),
    "infinite": lambda b, h, q, kv: (q >= kv) & (q - kv < float("inf")) & ~(q - kv < -float("inf")),
    "no number": lambda b, h, q, kv: (q - kv != float("nan")) & ~(q - kv < float("nan")),
    "nan": lambda b, h, q, kv: (q >= kv) & (nan[q] > kv),
    "not below nan": lambda b, h, q, kv: (q >= kv) & ~(kv < nan[q]),
    "root": lambda b, h, q, kv: torch.sqrt(-q) > kv,
    "bits": lambda b, h, q, kv: (~most[q] < 0) & (q >= kv),
    "minus a truth value": lambda b, h, q, kv: kv - (q > 3) >= 5,
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    program, tables, _ = trace_mask_mod(EXACT[name])
    intervals = row_intervals(program, tables, batch=1, seqlen_q=S, seqlen_k=S, device="cpu")
    intervals.check()
    assert torch.equal(intervals.to_dense(), dense_mask(EXACT[name], 1, S, S))


bytes_ = (torch.arange(S) % 20).to(torch.int8)
REFUSED = {
    "clamp": (
        lambda b, h, q, kv: torch.clamp(bytes_[q], torch.tensor(1), torch.tensor(200)) == kv,
        "`clamp` of tensors of several dtypes",
    ),
    "large": (
        lambda b, h, q, kv: q * 3 + M == kv - M - 1,
        "which 64 bits do not hold|may wrap around in torch.int64",
    ),
    "of what is unsupported": (
        lambda b, h, q, kv: torch.square(q - kv).clamp(min=0) < 16,
        "`square` is not an operation on masks",
    ),
    "bits of what is unsupported": (
        lambda b, h, q, kv: ~torch.square(q - kv) < 16,
        "`square` is not an operation on masks",
    ),
    "steps": (
        lambda b, h, q, kv: (q - kv) % M == 0,
        "repeats in steps of more keys than there can",
    ),
    "a tuple": (lambda b, h, q, kv: (q > 3, kv > 3), "something else than a truth value"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_way_for_intervals(name):
    mask_mod, reason = REFUSED[name]
    with pytest.raises(UnsupportedMaskError, match=reason):
        slices_from_block_mask(one_block_mask(mask_mod, 1, S, S, "cpu"))


def test_a_mask_mod_of_other_arguments():
    with pytest.raises(TypeError, match="`mask_mod` must be a function of b, h, q and kv: "):
        magi_compile.create_block_mask(lambda b, h, q: q > 3, None, None, S, S, device="cpu")


def test_captured_ints_have_an_end():
    with pytest.raises(
        ValueError, match=r"a captured int must be within 2\*\*40, got 1125899906842624"
    ):
        row_intervals("q + s0 >= kv", (), [2**50], batch=1, seqlen_q=S, seqlen_k=S)
