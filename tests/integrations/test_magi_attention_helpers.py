"""Helpers that MagiAttention's documents show, by what these say that they do."""

import importlib
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from magi_compile.integrations.flex_flash_attn import slices_of
from magi_compile.integrations.magi_attention import (
    AttnMaskType,
    AttnRanges,
    apply_padding,
    compute_pad_size,
    infer_attn_mask_from_cu_seqlens,
    infer_attn_mask_from_sliding_window,
    infer_varlen_mask_from_batch,
    magi_attn_varlen_key,
    pad_at_dim,
    squash_batch_dim,
    unpad_at_dim,
)


def dense(mask, seqlen_q, seqlen_k):
    """The mask of slices, none of which may overlap."""
    q_ranges, k_ranges, types = mask
    assert isinstance(q_ranges, AttnRanges)
    assert isinstance(k_ranges, AttnRanges)
    assert all(isinstance(x, AttnMaskType) for x in types)
    return slices_of(q_ranges, k_ranges, types, seqlen_q, seqlen_k).to_dense()


def window_of(q_range, k_range, window, size):
    """The last row at the last key, and of the rows only as many as there are keys."""
    rows, keys = torch.arange(size)[:, None], torch.arange(size)
    left, right = (size if side == -1 else side for side in window)
    inside = (rows >= max(q_range[0], q_range[1] - (k_range[1] - k_range[0]))) & (rows < q_range[1])
    inside = inside & (keys >= k_range[0]) & (keys < k_range[1])
    distance = (rows - q_range[1]) - (keys - k_range[1])
    return inside & (distance <= left) & (distance >= -right)


WINDOWS = [(2, 3), (0, 0), (4, 0), (-1, 0), (0, -1), (-1, -1), (-1, 2), (30, 1), (7, 7)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("q_range", "k_range"),
    [((5, 15), (5, 15)), ((3, 9), (5, 17)), ((2, 16), (6, 11)), ((4, 4), (5, 9)), ((0, 1), (0, 1))],
)
def test_window(q_range, k_range, window):
    mask = infer_attn_mask_from_sliding_window(q_range, k_range, window)
    torch.testing.assert_close(dense(mask, 20, 20), window_of(q_range, k_range, window, 20))
    ranges = (SimpleNamespace(start=a, end=b) for a, b in (q_range, k_range))  # as theirs are
    assert infer_attn_mask_from_sliding_window(*ranges, window) == mask


BORDERS = [0, 7, 7, 20, 21, 40]


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal):
    others = [0, 3, 9, 20, 25, 44]
    cu_q, cu_k = torch.tensor(BORDERS), torch.tensor(others)
    *mask, total_q, total_k = infer_attn_mask_from_cu_seqlens(cu_q, cu_k, causal)
    assert (total_q, total_k) == (40, 44)
    pairs = [list(pairwise(x)) for x in (BORDERS, others)]
    kind = AttnMaskType.CAUSAL if causal else AttnMaskType.FULL
    assert mask == [*pairs, [kind] * 5]  # a slice for each document


@pytest.mark.parametrize("first", [0, 1, 4, 50])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_of_documents(window, first):
    borders = torch.tensor(BORDERS, dtype=torch.int32)
    found = infer_attn_mask_from_cu_seqlens(
        borders, borders, window_size=window, global_window_size=first
    )
    row, key = torch.arange(40)[:, None], torch.arange(40)
    begins = torch.tensor(BORDERS)[torch.bucketize(key, torch.tensor(BORDERS), right=True) - 1]
    wanted = (begins[:, None] == begins) & (row >= -1)
    left, right = (40 if side == -1 else side for side in window)
    wanted &= (key <= row + right) & ((key >= row - left) | (key - begins < first))
    torch.testing.assert_close(dense(found[:3], 40, 40), wanted)
    assert found[3:] == (40, 40)


def test_windows_of_rows_and_keys():
    """Documents of other lengths on the two sides."""
    cu_q, cu_k = torch.tensor([0, 6, 18]), torch.tensor([0, 9, 14])
    *mask, total_q, total_k = infer_attn_mask_from_cu_seqlens(cu_q, cu_k, window_size=(3, 1))
    wanted = window_of((0, 6), (0, 9), (3, 1), 18) | window_of((6, 18), (9, 14), (3, 1), 18)
    torch.testing.assert_close(dense(mask, total_q, total_k), wanted[:, :14])


def test_a_batch_is_documents():
    cu_q, cu_k = infer_varlen_mask_from_batch(3, 5, device="cpu")
    assert cu_q.dtype == torch.int32
    assert cu_q.tolist() == cu_k.tolist() == [0, 5, 10, 15]
    x = torch.arange(24).view(2, 3, 4)
    torch.testing.assert_close(squash_batch_dim(x), torch.arange(24).view(6, 4))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_padding(dim):
    x = torch.randn(2, 3, 4, requires_grad=True)
    right, left = (pad_at_dim(x, dim, 2, value=7.0, side=side) for side in ("right", "left"))
    torch.testing.assert_close(unpad_at_dim(right, dim, 2), x)
    torch.testing.assert_close(unpad_at_dim(left.flip(dim), dim, 2).flip(dim), x)
    for padded in (right, left):
        assert (padded == 7).sum() == 2 * x.numel() // x.shape[dim]
        (gradient,) = torch.autograd.grad(padded.sum(), x)
        torch.testing.assert_close(gradient, torch.ones_like(x))
    torch.testing.assert_close(pad_at_dim(x, dim, 0), x)


def test_padding_of_a_mask():
    q_ranges, k_ranges = AttnRanges.from_ranges([[0, 4], [4, 8]]), [[0, 4], [0, 8]]
    mask = apply_padding(q_ranges, k_ranges, [AttnMaskType.FULL, AttnMaskType.CAUSAL], 8, 3)
    assert q_ranges == [(0, 4), (4, 8)]  # as it was
    assert mask[0] == [(0, 4), (4, 8), (8, 11)]
    found = dense(mask, 11, 11)
    wanted = torch.ones(8, 8, dtype=torch.bool).tril()
    wanted[:4, :4] = True
    torch.testing.assert_close(found, torch.nn.functional.pad(wanted, (0, 3, 0, 3)))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ValueError,
            "`side` must be 'left' or 'right', got 'top'",
            lambda x: pad_at_dim(x, 0, 1, side="top"),
        ),
        (ValueError, "`pad_size` must be an int of at least 0, got -1", lambda x: pad_at_dim(x, 0, -1)),
        (ValueError, "`pad_size` must be at most the size of `x`, 3, got 4", lambda x: unpad_at_dim(x, 0, 4)),
        (
            ValueError,
            "`global_window_size` must be an int of at least 0, got -2",
            lambda x: infer_attn_mask_from_cu_seqlens([0, 4], [0, 4], False, (1, 0), -2),
        ),
        (
            ValueError,
            "`causal` must be False beside a window, got (1, 0)",
            lambda x: infer_attn_mask_from_cu_seqlens([0, 4], [0, 4], True, (1, 0)),
        ),
        (
            ValueError,
            "`cu_seqlens_k` must have the length of `cu_seqlens_q` (2), got 3",
            lambda x: infer_attn_mask_from_cu_seqlens([0, 4], [0, 2, 4]),
        ),
        (
            NotImplementedError,
            "`cu_seqlens_k` must be `cu_seqlens_q` where `global_window_size` is not 0",
            lambda x: infer_attn_mask_from_cu_seqlens([0, 4], [0, 5], False, (1, 0), 2),
        ),
        (
            ValueError,
            "`window_size` must be (left, right), got (1,)",
            lambda x: infer_attn_mask_from_sliding_window((0, 4), (0, 4), (1,)),
        ),
        (ValueError, "`window_size` must hold None, -1 or", lambda x:
         infer_attn_mask_from_cu_seqlens([0, 4], [0, 4], window_size=(1, 2.5))),
        (ValueError, "`k_range` must be (start, end)", lambda x:
         infer_attn_mask_from_sliding_window((0, 4), 3, (1, 0))),
        (ValueError, "`cp_size` must be an int of at least 1, got None", lambda x: compute_pad_size(9, None, 2)),
        (ValueError, "`chunk_size` must be an int of at least 1, got 0", lambda x: compute_pad_size(9, 2, 0)),
        (ValueError, "`x` must have at least 2 dimensions, got shape [3]", squash_batch_dim),
        (TypeError, "`x` must be a tensor, got int", lambda x: squash_batch_dim(3)),
        (ValueError, "`dim` must be in [-1, 1), got 2", lambda x: pad_at_dim(x, 2, 1)),
        (TypeError, "`dim` must be an int, got None", lambda x: unpad_at_dim(x, None, 1)),
        (TypeError, "`value` must be a number, got 'x'", lambda x: pad_at_dim(x, 0, 1, "x")),
        (TypeError, "`q_ranges` must be a list of pairs (start, end), got 3", lambda x: apply_padding(3, [], [], 8, 1)),
        (TypeError, "`k_ranges` must be a list of pairs", lambda x: apply_padding([], [[1]], [], 8, 1)),
        (TypeError, "`attn_mask_type` must be a list, got int", lambda x: apply_padding([], [], 1, 8, 1)),
        (ValueError, "`total_seqlen` must be an int of at least 0", lambda x: apply_padding([], [], [], "8", 1)),
        (ValueError, "`seq_len` must be an int of at least", lambda x: infer_varlen_mask_from_batch(2, 2.5, "cpu")),
        (TypeError, "`device` must be a device or the name of one", lambda x: infer_varlen_mask_from_batch(2, 2, "x")),
    ],
)  # fmt: skip
def test_wrong_arguments(error, message, call):
    with pytest.raises(error, match=re.escape(message)):
        call(torch.zeros(3))


# All names that `magi_attention.api` exports, and those of its documents beside them.
PUBLIC = [
    "AttnForwardMeta",
    "AttnMaskType",
    "AttnOverlapMode",
    "AttnRange",
    "AttnRanges",
    "BSDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchConfig",
    "DistAttnConfig",
    "DistAttnRuntimeDictManager",
    "DistAttnRuntimeKey",
    "GeneralAttnMaskType",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "LBDispatchAlg",
    "MinHeapDispatchAlg",
    "OverlapAlg",
    "OverlapConfig",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
    "apply_padding",
    "calc_attn",
    "clear_cache",
    "compute_pad_size",
    "dispatch",
    "dist_attn_runtime_dict_mgr",
    "flex_flash_attn_func",
    "get_most_recent_key",
    "get_position_ids",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "magi_attn_flex_dispatch",
    "magi_attn_flex_key",
    "magi_attn_varlen_dispatch",
    "magi_attn_varlen_key",
    "make_flex_key_for_new_mask_after_dispatch",
    "make_varlen_key_for_new_mask_after_dispatch",
    "pad_at_dim",
    "roll",
    "roll_simple",
    "squash_batch_dim",
    "undispatch",
    "unpad_at_dim",
]
INSTEAD = {
    "AttnRange": r"a pair `\(start, end\)`",
    "DistAttnRuntimeDictManager": "the plan itself",
    "GeneralAttnMaskType": "a name, a number, an AttnMaskType, or a list",
    "clear_cache": "is freed",
    "dist_attn_runtime_dict_mgr": "the plan itself",
    "magi_attn_flex_dispatch": "`magi_attn_flex_key`, then `dispatch`",
    "magi_attn_varlen_dispatch": "`magi_attn_varlen_key`, then `dispatch`",
    "roll_simple": "call `roll`",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_here_or_says_what_is(name):
    module = importlib.import_module("magi_compile.integrations.magi_attention")
    if name in vars(module):
        assert callable(getattr(module, name))
        return
    message = f"`{name}` of MagiAttention has no counterpart.*{INSTEAD.get(name, 'ContextParallelOptions')}"
    with pytest.raises(ImportError, match=message):
        getattr(module, name)


def test_there_are_no_keys_of_cross_attention():
    with pytest.raises(NotImplementedError, match="a key must be of self-attention"):
        magi_attn_varlen_key([0, 5, 9], [0, 5, 8], 2, 2, 16, 0, None)
