"""Local kernels: attention step by step, and masks as segments of packed documents."""

import pytest
import torch

from magi_bench.ranks.strategies.kernels import (
    Ours,
    steps_of,
    sums_of,
)
from magi_bench.ranks.strategies.placement import between, count, positions, spans_of, zigzag
from magi_bench.ranks.strategies.varlen import LOCAL_KERNELS, FlashAttention2, FlashAttention4
from magi_compile.kernels.base import Grads, Saved
from magi_compile.kernels.reference import exact_backward, exact_forward
from magi_compile.kernels.select import problem_on
from magi_compile.masks.library import MASKS
from tests.bench.ranks.strategies.plain import Plain, PlainSquare

LENGTHS = [45, 1, 1, 9, 13, 2, 19]
PROBLEM = problem_on(torch.device("cpu"), torch.float32, (4, 2, 16, 16), 0.25)


@pytest.mark.parametrize("kernel", [Ours, Plain, PlainSquare])
@pytest.mark.parametrize(
    "mask", ["full", "causal", "document_full", "document_causal", "share_question"]
)
def test_steps_are_parts_of_the_whole(kernel, mask):
    slices, total = MASKS[mask](LENGTHS).slices, sum(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(total, n, 16, generator=generator) for n in (4, 2, 2, 4))
    out, lse = exact_forward(q, k, v, slices, 0.25)
    grads = exact_backward(Grads(dout, None), Saved(q, k, v, out, lse), slices, 0.25)
    owners = zigzag(spans_of(LENGTHS), 3)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for spans in owners:
        rows = positions(spans, "cpu")
        masks = [between(slices, spans, keys) for keys in owners]
        steps = steps_of(kernel(PROBLEM), masks, torch.device("cpu"))
        seen = dq = None
        for step, keys in zip(steps, owners, strict=True):
            columns = positions(keys, "cpu")
            seen = step.forward(q[rows], k[columns], v[columns], seen)
        torch.testing.assert_close(seen.out, out[rows].float())
        torch.testing.assert_close(seen.lse, lse[:, rows].float())
        for step, keys in zip(steps, owners, strict=True):
            columns = positions(keys, "cpu")
            saved = Saved(q[rows], k[columns], v[columns], *seen)
            dq, shares = step.backward(dout[rows], saved, dq)
            shares = sums_of(None, shares, (k[columns], v[columns]))
            for total_of, share in zip(found[1:], shares, strict=True):
                total_of[columns] += share
        found[0][rows] = dq
    for x, exact in zip(found, grads, strict=True):
        torch.testing.assert_close(x, exact.float(), rtol=1e-4, atol=1e-5)


def pieces_of(kernel, slices):
    return kernel(PROBLEM).pieces(slices, torch.device("cpu"))


@pytest.mark.parametrize("mask", ["causal", "document_full", "document_causal"])
def test_a_step_of_a_zigzag_is_one_call(mask):
    documents = [8] if mask == "causal" else [8, 16, 24]
    slices, documents = MASKS[mask](documents).slices, spans_of(documents)
    owners = zigzag(documents, 2)
    for queries in owners:
        for keys in owners:
            (piece,) = pieces_of(Plain, between(slices, queries, keys))
            segments = piece.prepared
            assert len(segments.places) == len(documents)
            assert segments.causal == (mask != "document_full" and queries is keys)


def test_a_step_of_one_document_takes_views_of_halves():
    slices = MASKS["causal"]([16]).slices
    first, second = zigzag([(0, 16)], 2)
    for kernel in (Ours, Plain):
        (piece,) = pieces_of(kernel, between(slices, first, second))
        assert (piece.rows, piece.keys) == (slice(4, 8), slice(0, 8))
        (piece,) = pieces_of(kernel, between(slices, second, first))
        assert (piece.rows, piece.keys) == (slice(0, 8), slice(0, 4))


def test_gathered_keys_in_order_are_a_call_for_each_chunk():
    slices = MASKS["causal"]([32]).slices
    queries = zigzag([(0, 32)], 4)[1]
    pieces = pieces_of(Plain, between(slices, queries, [(0, 32)]))
    assert [(piece.rows, piece.keys) for piece in pieces] == [
        (slice(0, 4), slice(0, 8)),
        (slice(4, 8), slice(0, 28)),
    ]


def test_a_mask_that_shows_nothing_is_no_call():
    slices = MASKS["document_full"]([8, 8]).slices
    nothing = between(slices, [(0, 8)], [(8, 16)])
    assert count([(0, 8)]) == nothing.seqlen_q
    assert pieces_of(Ours, nothing) == pieces_of(Plain, nothing) == []


def test_documents_of_one_token_break_no_call():
    (piece,) = pieces_of(Plain, MASKS["document_causal"](LENGTHS).slices)
    assert piece.prepared.causal
    assert len(piece.prepared.places) == len(LENGTHS)


def test_windows_are_refused():
    slices = MASKS["sliding_window_causal"]([64], window=8).slices
    assert Plain(PROBLEM).refusals(slices) == [
        "takes slices without moving left edges only, so no windows"
    ]
    assert Ours(PROBLEM).refusals(slices) == []


@pytest.mark.parametrize("name", [x for x in LOCAL_KERNELS if x != "ours"])
def test_packages_say_what_is_missing(name):
    assert LOCAL_KERNELS[name](PROBLEM).missing() == "runs on a GPU, not on cpu"


def test_packages_that_are_not_installed():
    on_gpu = PROBLEM.__class__("cuda", (9, 0), torch.bfloat16, 4, 2, 16, 16, 0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "flash_attn.cute.interface", None)
        assert "flash_attn.cute.interface" in FlashAttention4(on_gpu).missing()
    assert FlashAttention2(on_gpu).missing() is None
    wide = PROBLEM.__class__("cuda", (9, 0), torch.float32, 4, 2, 16, 16, 0.25)
    assert FlashAttention2(wide).missing().endswith("not torch.float32")
