"""What users may not give for document borders, windows, lists of slices, devices and batch sizes."""

import re

import numpy as np
import pytest
import torch

from magi_compile.masks import (
    AttnSlice,
    AttnSlices,
    create_block_mask,
    library,
    plot,
    slices_from_block_mask,
)


@pytest.mark.parametrize(
    ("cu_seqlens", "options", "error", "message"),
    [
        (torch.tensor([0.0, 1.0]), {}, TypeError, "`cu_seqlens_q` must hold int32 or int64 values"),
        (
            torch.tensor([[0, 1]]),
            {},
            ValueError,
            r"`cu_seqlens_q` must have shape \[num_docs \+ 1\]",
        ),
        ([1, 2], {}, ValueError, "`cu_seqlens_q` must start at 0, got 1"),
        ([0, 4, 2], {}, ValueError, r"`cu_seqlens_q` must never decrease, got \[4, 2\] at 1"),
        (
            [0, 4],
            {"cu_seqlens_k": [0, 1, 2]},
            ValueError,
            r"`cu_seqlens_k` must have the length .* got 3",
        ),
        ([0, 4], {"window": 3}, ValueError, r"`window` must be \(left, right\), got 3"),
        ([0, 4], {"window": (-2, 0)}, ValueError, "`window` must hold None, -1 or lengths >= 0"),
    ],
)
def test_wrong_documents(cu_seqlens, options, error, message):
    with pytest.raises(error, match=message):
        AttnSlices.from_cu_seqlens(cu_seqlens, **options)


def test_wrong_flags():
    for name, call in {
        "causal": lambda flag: AttnSlices.from_cu_seqlens([0, 4], causal=flag),
        "legend": lambda flag: plot(AttnSlices.causal(4), legend=flag),
    }.items():
        with pytest.raises(TypeError, match=f"`{name}` must be True or False, got 'no'"):
            call("no")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AttnSlices.from_slices(5), TypeError, "`slices` must be a list of AttnSlice, got 5"),
        (lambda: AttnSlices.from_slices([5]), ValueError, "`slices` must hold (q_range, k_range, mask_type), got 5"),
        (lambda: AttnSlices.from_slices([AttnSlice((0, 4), (0, 4), None)]),
         TypeError, "`slices` must have a MaskType in each, got None"),
        (lambda: AttnSlices.from_slices([AttnSlice((0, 4), (0, 4), 1.5)]),
         TypeError, "`slices` must have a MaskType in each, got 1.5"),
        (lambda: AttnSlices.from_lists([[0, 2**70]], [[0, 4]], [0]),
         ValueError, f"`q_ranges` must stay below 2**30, got {2**70}"),
        (lambda: AttnSlices.from_lists([[0, 2**40]], [[0, 4]], [0]),
         ValueError, f"`q_ranges` must stay below 2**30, got {2**40}"),
        (lambda: AttnSlices.from_cu_seqlens([0, 2**70]), ValueError, "`cu_seqlens_q` must stay "
         f"below 2**30, got {2**70}"),
    ],
)  # fmt: skip
def test_wrong_slices(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def causal(b, h, q, kv):
    return q >= kv


@pytest.mark.parametrize(
    "call",
    [
        lambda device: create_block_mask(causal, None, None, 8, 8, device=device),
        lambda device: AttnSlices.causal(4).to(device),
        lambda device: AttnSlices.from_lists([[0, 4]], [[0, 4]], [0], device=device),
        lambda device: library.causal([4], device=device),
        lambda device: library.document_causal([4], device=device),
    ],
)
def test_wrong_devices(call):
    for device in ("gpu", 3.5, True):
        message = f"`device` must be a device or the name of one, got {device!r}"
        with pytest.raises(TypeError, match=message):
            call(device)
    with pytest.raises(
        ValueError, match="`device` must be one that PyTorch can use here, got 'hpu:7': "
    ):
        call("hpu:7")
    call("cpu")


def test_wrong_batch_sizes():
    mask = create_block_mask(causal, None, None, 32, 32, device="cpu")
    for batch, error, message in (
        (-1, ValueError, "`batch` must be at least 1, got -1"),
        (0, ValueError, "`batch` must be at least 1, got 0"),
        ("2", TypeError, "`batch` must be an int, got '2'"),
        (True, TypeError, "`batch` must be an int, got True"),
        (2**25, ValueError, f"`batch` must be at most {2**25 - 1}, .* got {2**25}"),
    ):
        with pytest.raises(error, match=message):
            slices_from_block_mask(mask, batch)
    assert slices_from_block_mask(mask, np.int64(2)).seqlen_q == 64
