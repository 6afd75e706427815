"""What users may not give for document borders and windows."""

import pytest
import torch

from magi_compile.masks import AttnSlices


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
