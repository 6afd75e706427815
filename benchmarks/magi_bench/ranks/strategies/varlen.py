"""Local kernels that take packed documents: any mask whose slices are full, or causal at their last row, in as few
calls as `cu_seqlens` of queries and of keys can say it.

`cu_seqlens` of both cut rows and keys into as many segments, and a segment's rows see its keys. Rows that see nothing
in a call are segments without keys, keys that nobody sees are segments without rows: so a step of a zigzag ring, in
which all rows of documents see the front halves of an owner's documents, is one call on tensors that nobody copies.
"""

from __future__ import annotations

import importlib
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_bench.contenders.base import import_error
from magi_bench.ranks.strategies.kernels import LocalKernel, Ours, Piece
from magi_compile.kernels.base import BackwardOutput, ForwardOutput, Saved
from magi_compile.kernels.merge import merge_prior
from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType


class Segments(NamedTuple):
    """The arguments of a call. The last row of a segment sees its last key, where it is causal."""

    # where segments of rows begin, and the end; int32 `[segments + 1]` on the device
    queries: Tensor
    keys: Tensor  # the same of keys
    most_queries: int  # rows of the longest segment
    most_keys: int  # the same of keys
    causal: bool  # whether each row of a segment sees one key less than the row behind it
    places: list[tuple[slice, slice]]  # rows and keys of each segment that has both, on the host


class VarlenKernel(LocalKernel):
    """A kernel of another package, or of PyTorch."""

    is_square = False  # whether a causal segment must have as many keys as rows
    _random: tuple[Tensor, ...] = ()  # of those of PyTorch, for dropout, of which there is none
    dtypes = (torch.bfloat16, torch.float16)

    def missing(self) -> str | None:
        if self.problem.device_type != "cuda":
            return f"runs on a GPU, not on {self.problem.device_type}"
        if self.problem.dtype not in self.dtypes:
            return f"takes {' and '.join(map(str, self.dtypes))}, not {self.problem.dtype}"
        return None

    def refusals(self, slices: AttnSlices) -> list[str]:
        lengths = (slices.q_ranges, slices.k_ranges)
        num_rows, num_keys = (ranges[:, 1] - ranges[:, 0] for ranges in lengths)
        # A diagonal is nothing but documents of one token.
        is_diagonal = (slices.mask_types == MaskType.BI_CAUSAL) & (num_rows == num_keys)
        if bool(((slices.mask_types > MaskType.CAUSAL) & ~is_diagonal).any()):
            return ["takes slices without moving left edges only, so no windows"]
        return []

    def pieces(self, slices: AttnSlices, device: torch.device) -> list[Piece]:
        parts = still_left_edges(slices)
        if self.is_square:
            parts = [part for item in parts for part in cut_to_square(item)]
        return [self._piece(chain, device) for chain in chains(parts)]

    def _piece(self, chain: Sequence[AttnSlice], device: torch.device) -> Piece:
        rows = slice(chain[0].q_range[0], chain[-1].q_range[1])
        keys = slice(chain[0].k_range[0], chain[-1].k_range[1])
        return Piece(rows, keys, segments_of(chain, device))

    def merged(
        self, qkv: Sequence[Tensor], prepared: Any, prior: ForwardOutput | None, dtype: torch.dtype
    ) -> ForwardOutput:
        q, k, v = qkv
        return merge_prior(self.forward(q, k, v, prepared), prior, dtype)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> ForwardOutput:
        """Out in the dtype of q, 0 in rows that see nothing, where lse is -inf."""


# From slices to segments


def still_left_edges(slices: AttnSlices) -> list[AttnSlice]:
    """The same mask in slices that are full or causal, sorted by row. No slice has rows of two documents, which those
    in normal form may have where documents have one token."""
    row, begin, end = slices.rects().live().by_row()
    if not len(row):
        return []
    order = torch.argsort(begin * slices.seqlen_q + row)
    row, begin, end = row[order], begin[order], end[order]
    growth = end.diff()
    goes_on = (row.diff() == 1) & (begin.diff() == 0) & ((growth == 0) | (growth == 1))
    # Where a slice changes from full to causal or back, another one begins.
    goes_on[1:] &= (growth[1:] == growth[:-1]) | ~goes_on[:-1]
    edges = torch.cat([goes_on.new_ones(1), ~goes_on, goes_on.new_ones(1)]).nonzero()[:, 0]
    first, last = edges[:-1], edges[1:] - 1
    grows = end[last] > end[first]
    table = torch.stack([row[first], row[last] + 1, begin[first], end[last], grows], 1)
    return [
        AttnSlice((rows, until), (keys, keys_until), MaskType(is_causal))
        for rows, until, keys, keys_until, is_causal in sorted(table.tolist())
    ]


def chains(slices: Sequence[AttnSlice]) -> list[list[AttnSlice]]:
    """Slices, sorted by row, in lists that one call can take: of one type, and each below and to the right of the one
    before it."""
    found: list[list[AttnSlice]] = []
    for item in slices:
        fitting = (chain for chain in found if _continues(chain, item))
        chain = next(fitting, None)
        if chain is None:
            found.append([item])
        else:
            chain.append(item)
    return found


def _continues(chain: Sequence[AttnSlice], item: AttnSlice) -> bool:
    last, types = chain[-1], (_type_of(chain), _type_of([item]))
    return (
        (None in types or types[0] == types[1])
        and last.q_range[1] <= item.q_range[0]
        and last.k_range[1] <= item.k_range[0]
    )


def _type_of(chain: Sequence[AttnSlice]) -> MaskType | None:
    """The type of the slices that have several rows; None if all have one, which makes them full and causal."""
    several = (item.mask_type for item in chain if item.q_range[1] - item.q_range[0] > 1)
    return next(several, None)


def cut_to_square(item: AttnSlice) -> list[AttnSlice]:
    """A causal slice as the keys that all its rows see, and as many keys as rows."""
    (q_begin, q_end), (k_begin, k_end), mask_type = item
    middle = k_end - (q_end - q_begin)
    if mask_type != MaskType.CAUSAL or middle <= k_begin:
        return [item]
    full = AttnSlice(item.q_range, (k_begin, middle), MaskType.FULL)
    return [full, AttnSlice(item.q_range, (middle, k_end), MaskType.CAUSAL)]


def segments_of(chain: Sequence[AttnSlice], device: torch.device) -> Segments:
    """The segments of a chain, in rows and keys from its first ones on."""
    first_row, first_key = chain[0].q_range[0], chain[0].k_range[0]
    queries, keys, places = [0], [0], []
    for q_range, k_range, _ in chain:
        (q_begin, q_end), (k_begin, k_end) = (
            (begin - first, end - first)
            for (begin, end), first in ((q_range, first_row), (k_range, first_key))
        )
        if queries[-1] < q_begin:
            queries.append(q_begin)
            keys.append(keys[-1])
        if keys[-1] < k_begin:
            queries.append(queries[-1])
            keys.append(k_begin)
        queries.append(q_end)
        keys.append(k_end)
        places.append((slice(q_begin, q_end), slice(k_begin, k_end)))
    most_queries, most_keys = (
        max(end - begin for begin, end in itertools.pairwise(bounds)) for bounds in (queries, keys)
    )
    of_queries, of_keys = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in (queries, keys)
    )
    causal = _type_of(chain) == MaskType.CAUSAL
    return Segments(of_queries, of_keys, most_queries, most_keys, causal, places)


# Packages


class FlashAttention4(VarlenKernel):
    """The package flash-attn-4."""

    def missing(self) -> str | None:
        return super().missing() or import_error("flash_attn.cute.interface")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> ForwardOutput:
        interface = importlib.import_module("flash_attn.cute.interface")
        options = {"return_lse": True, **self._options(segments)}
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, **options)
        return ForwardOutput(out, lse)

    def backward(self, dout: Tensor, saved: Saved, prepared: Segments) -> BackwardOutput:
        interface = importlib.import_module("flash_attn.cute.interface")
        q, k, v, out, lse = saved
        tensors = (q, k, v, out, dout.contiguous(), lse)
        # Nobody writes to keys of a segment without rows.
        options = {"dk": torch.zeros_like(k), "dv": torch.zeros_like(v), **self._options(prepared)}
        dq, dk, dv, *_ = interface._flash_attn_bwd(*tensors, **options)
        return BackwardOutput(dq, dk, dv)

    def _options(self, segments: Segments) -> dict[str, Any]:
        return {
            "softmax_scale": self.problem.softmax_scale,
            "causal": segments.causal,
            "cu_seqlens_q": segments.queries,
            "cu_seqlens_k": segments.keys,
            "max_seqlen_q": segments.most_queries,
            "max_seqlen_k": segments.most_keys,
        }


class FlashAttention2(VarlenKernel):
    """PyTorch's copy of FlashAttention 2."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> ForwardOutput:
        scale = {"scale": self.problem.softmax_scale}
        arguments = (*_lengths(segments), 0.0, segments.causal, False)
        out, lse, *random, _ = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, **scale)
        self._random = tuple(random)
        # It gives +inf where a row sees nothing.
        return ForwardOutput(out, lse.masked_fill_(lse == torch.inf, -torch.inf))

    def backward(self, dout: Tensor, saved: Saved, prepared: Segments) -> BackwardOutput:
        q, k, v, out, lse = saved
        arguments = (*_lengths(prepared), 0.0, prepared.causal, *self._random)
        grads = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *arguments, scale=self.problem.softmax_scale
        )
        return BackwardOutput(*grads)


class Cudnn(VarlenKernel):
    """PyTorch's cuDNN attention, a call for each segment: packed, it has no right gradients yet."""

    is_square = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> ForwardOutput:
        out, lse = torch.zeros_like(q), q.new_full((q.shape[1], q.shape[0]), -torch.inf).float()
        for rows, keys in segments.places:
            part, part_lse, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *(_batched(x) for x in (q[rows], k[keys], v[keys])),
                *(None, True, 0.0, _is_causal(rows, segments), False),
                scale=self.problem.softmax_scale,
            )
            self._random = (rest[4], rest[5])
            out[rows] = _packed(part)
            lse[:, rows] = part_lse.view(q.shape[1], -1)
        return ForwardOutput(out, lse)

    def backward(self, dout: Tensor, saved: Saved, prepared: Segments) -> BackwardOutput:
        q, k, v, out, lse = saved
        grads = BackwardOutput(*(torch.zeros_like(x) for x in (q, k, v)))
        for rows, keys in prepared.places:
            tensors = (dout[rows], q[rows], k[keys], v[keys], out[rows])
            lengths = (None, None, rows.stop - rows.start, keys.stop - keys.start)
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *(_batched(x) for x in tensors),
                lse[None, :, rows, None].contiguous(),
                *self._random,
                *(None, *lengths, 0.0, _is_causal(rows, prepared)),
                scale=self.problem.softmax_scale,
            )
            places = (grads.dq[rows], grads.dk[keys], grads.dv[keys])
            for place, x in zip(places, found, strict=True):
                place.copy_(_packed(x))
        return grads


def _is_causal(rows: slice, segments: Segments) -> bool:
    """True if a segment of several rows is: a single row sees all keys, of which it may have more than one."""
    return segments.causal and rows.stop - rows.start > 1


def _lengths(segments: Segments) -> tuple[Any, ...]:
    return (segments.queries, segments.keys, segments.most_queries, segments.most_keys)


def _batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _packed(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


#: Local kernels by the names of `--local-kernel`.
LOCAL_KERNELS: dict[str, type[LocalKernel]] = {
    "ours": Ours,
    "flash-attn-4": FlashAttention4,
    "cudnn": Cudnn,
    "fa2": FlashAttention2,
}
