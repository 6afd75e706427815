"""Documents that are packed into batch entries, put into a BlockMask: from `cu_seq_lens`, or from positions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from magi_compile._compat import outside_of_modes, traces_inner_graph, version_of
from magi_compile.masks.arguments import read_cu_seqlens
from magi_compile.masks.block_mask import one_block_mask

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# The document of each row and of each key, `[B, L]` and `[B, S]`.
Documents = tuple[Tensor, Tensor] | None


def plain_block_mask(
    mask_function: MaskFunction,
    batch: int,
    q_length: int,
    kv_length: int,
    device: torch.device | str,
) -> BlockMask:
    """A BlockMask whose mask function says everything."""
    if torch.compiler.is_compiling():
        # The lowering removes it, block lists and all.
        return create_block_mask(mask_function, batch, None, q_length, kv_length, device)
    return one_block_mask(mask_function, batch, q_length, kv_length, device)


def lists_given(
    of_rows: Any, of_keys: Any, sizes: tuple[int, int, int]
) -> tuple[Tensor, Tensor] | None:
    """`cu_seq_lens_q` and `cu_seq_lens_k`, or None where neither is given.

    Raises TypeError or ValueError for kinds that do not fit; `documents_of_lists` reads their numbers.
    """
    if of_rows is None and of_keys is None:
        return None
    if of_rows is None:
        raise ValueError("`cu_seq_lens_q` must be given where `cu_seq_lens_k` is, got None")
    if of_keys is None and sizes[1] != sizes[2]:
        raise ValueError(
            "`cu_seq_lens_k` must be given with `cu_seq_lens_q` where rows and keys differ, "
            f"{sizes[1]} and {sizes[2]}, got None"
        )
    for name, given in (("cu_seq_lens_q", of_rows), ("cu_seq_lens_k", of_keys)):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {given!r}")
        if given.ndim != 1 or not given.shape[0]:
            raise ValueError(f"`{name}` must have shape [documents + 1], got {list(given.shape)}")
        if given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`{name}` must hold int32 or int64 values, got {given.dtype}")
    if of_keys is not None and of_keys.shape != of_rows.shape:
        raise ValueError(
            f"`cu_seq_lens_k` must have the length of `cu_seq_lens_q`, {of_rows.shape[0]}, got {of_keys.shape[0]}"
        )
    return of_rows, of_rows if of_keys is None else of_keys


def has_documents(mask_function: Any) -> bool:
    """True if transformers has put documents into a mask function, as far as its parts tell. Where they do not,
    documents are added once more, which changes nothing."""
    parts, seen = [mask_function], set()
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if "packed_sequence_mask_function" in getattr(part, "__qualname__", ""):
            return True
        for cell in getattr(part, "__closure__", None) or ():
            try:
                held = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            held = held if isinstance(held, (tuple, list)) else (held,)
            parts += [inner for inner in held if callable(inner)]
    return False


def may_be_packed(
    module: torch.nn.Module, mask: BlockMask | None, positions: Any, sizes: tuple[int, int, int]
) -> bool:
    """True if documents have to be read from `positions`, which this attention got, but its mask perhaps did not.

    transformers leaves documents out of a mask where the model does not hand the positions on (gpt-oss), where there
    is a cache (the default of `use_cache`), and where there is an `attention_mask`. Its flash attention reads the
    positions in each layer, unless the `attention_mask` has padding, and so do we. A BlockMask of the user's says
    everything itself.
    """
    _, rows, keys = sizes
    is_open = getattr(mask, "_magi_lacks_documents", False)
    if not is_open or not getattr(module, "is_causal", False) or rows != keys:
        return False
    return are_of_rows(positions, rows)


def are_of_rows(positions: Any, rows: int) -> bool:
    """True if `positions` are `[1 or B, rows]`, one for each row. Those of images and videos have more dimensions."""
    return isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == rows


class _WithinDocuments(NamedTuple):
    """A mask within documents (None where there is one document), and the tensors that these were read from."""

    block_mask: BlockMask | None
    tensors: tuple[Tensor, Tensor]
    versions: tuple[int, ...]

    def is_of(self, tensors: tuple[Tensor, Tensor], versions: tuple[int, ...]) -> bool:
        is_same = self.tensors[0] is tensors[0] and self.tensors[1] is tensors[1]
        return is_same and self.versions == versions


def within_documents(
    block_mask: Any,
    tensors: tuple[Tensor, Tensor],
    read: Callable[[tuple[Tensor, Tensor], tuple[int, int, int]], Documents],
    sizes: tuple[int, int, int],
) -> BlockMask | None:
    """`block_mask`, None for everything, where query and key are of the same document; made once for all layers that
    share it. It is `block_mask` itself if there is one document.

    `tensors` say where documents of rows and of keys begin, and `read` makes documents of them, or None if there is
    only one. `sizes` are batch entries, and rows and keys of each.
    """
    is_traced = torch.compiler.is_compiling()
    versions = () if is_traced else tuple(map(version_of, tensors))
    known: _WithinDocuments | None = getattr(block_mask, "_magi_within_documents", None)
    if known is not None and known.is_of(tensors, versions):
        return block_mask if known.block_mask is None else known.block_mask
    made = None
    # A mask of the user's is there for evaluation and for training.
    with nullcontext() if is_traced else outside_of_modes():
        documents = read(tensors, sizes)
        if documents is not None:
            of_row, of_key = documents

            def mask_function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                is_within = of_row[b, q] == of_key[b, kv]
                if block_mask is None:
                    return is_within
                return block_mask.mask_mod(b, h, q, kv) & is_within

            made = plain_block_mask(mask_function, *sizes, of_row.device)
    if block_mask is not None and not (is_traced and _is_in_inner_graph()):
        block_mask._magi_within_documents = _WithinDocuments(made, tensors, versions)
    return block_mask if made is None else made


@torch.compiler.assume_constant_result
def _is_in_inner_graph() -> bool:
    """True inside a traced checkpoint, which must not change objects from outside and shares no masks."""
    return traces_inner_graph()


def documents_of_positions(
    tensors: tuple[Tensor, Tensor], sizes: tuple[int, int, int]
) -> Documents:
    """The documents, which begin where positions go back to 0; None if there is only one.

    A gap, a step, a repeat or a jump back to another position is no border. 0 behind 0 is a document of one token if
    all positions are 0 or go up by 1, as in a pack; else it is a repeat.

    The tensors are the positions, `[1 or B, L]`, and the padding mask, with whose padding there are no documents, or
    the positions again if there is none. `sizes` are batch entries, and rows and keys of each.
    """
    positions, padding = tensors
    place = positions.expand(sizes[0], -1)
    before, here = place[:, :-1], place[:, 1:]
    is_start = here == 0
    is_counted = (is_start | (here == before + 1)).all(-1, keepdim=True)
    begins = is_start & ((before > 0) | is_counted)
    if padding is not positions:
        begins = begins & padding.all()
    if not torch.compiler.is_compiling() and not bool(begins.any()):
        return None
    of_row = torch.nn.functional.pad(begins.long().cumsum(-1), (1, 0))
    return of_row, of_row


def starts_of_documents(positions: Tensor, padding: Tensor | None) -> Tensor:
    """True where a document begins, bool `[B, S]`: at each row, and where positions, int `[B, S]`, do not go up by 1,
    as transformers has it. With a mask without `padding`, `[B, S]`, only positions of 0 begin documents."""
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    if padding is not None:
        starts[:, 1:] &= positions[:, 1:] == 0
    return starts


def documents_of_lists(tensors: tuple[Tensor, Tensor], sizes: tuple[int, int, int]) -> Documents:
    """A document begins at each number of `cu_seq_lens`, counted over all batch entries."""
    batch, *lengths = sizes
    if not torch.compiler.is_compiling() and all(x.device.type == "cpu" for x in tensors):
        _check_documents(tensors, sizes)
    of_row, of_key = (
        torch.searchsorted(
            starts,
            torch.arange(batch * length, device=starts.device, dtype=starts.dtype),
            right=True,
        ).view(batch, length)
        for starts, length in zip(tensors, lengths, strict=True)
    )
    return of_row, of_key


def _check_documents(lists: tuple[Tensor, Tensor], sizes: tuple[int, int, int]) -> None:
    """Raises for numbers in `cu_seq_lens_q` and `cu_seq_lens_k` that are no documents of the batch entries."""
    batch, *lengths = sizes
    entries, has_tokens = [], []
    for name, given, length in zip(("cu_seq_lens_q", "cu_seq_lens_k"), lists, lengths, strict=True):
        borders = read_cu_seqlens(name, given)
        end = int(borders[-1])
        if end > batch * length:
            raise ValueError(
                f"`{name}` must end within the {batch * length} tokens of all batch entries, got {end}"
            )
        if missing := sorted({*range(0, end, max(length, 1))} - {*borders.tolist()}):
            raise ValueError(
                f"`{name}` must hold the ends of batch entries, multiples of {length}, "
                f"got {borders.tolist()} without {missing[0]}"
            )
        entries.append(borders[:-1] // max(length, 1))
        has_tokens.append(borders.diff() > 0)
    of_others = (entries[0] != entries[1]) & has_tokens[0] & has_tokens[1]
    if of_others.any():
        number = int(of_others.nonzero()[0])
        raise ValueError(
            "`cu_seq_lens_k` must have each document in the batch entry where `cu_seq_lens_q` has it, "
            f"got document {number} in entries {int(entries[1][number])} and {int(entries[0][number])}"
        )
