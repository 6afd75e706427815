"""Mask_mods by `csrc/sm90/masks/mask_bits.cu`: what `slices_with_bits` gives, in one launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import flag_addresses, raise_pending
from magi_compile.kernels.sm90.codegen.pointwise import UnknownOperation
from magi_compile.kernels.sm90.masks.bits_source import (
    BitsSource,
    NodeWords,
    NumberWord,
    bits_source,
)
from magi_compile.kernels.sm90.masks.mask_graph import Values, mask_graph
from magi_compile.kernels.sm90.params import mask_mod_params
from magi_compile.kernels.sm90.runtime import ahead
from magi_compile.kernels.sm90.runtime.calls import Buffer, Call, Launch
from magi_compile.kernels.sm90.runtime.driver import load_function, on_device
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import Pointer
from magi_compile.masks.bits import BLOCK, WORDS
from magi_compile.masks.evaluation.bit_blocks import Listed
from magi_compile.masks.evaluation.block_lists import IS_FULL
from magi_compile.masks.evaluation.sizes import MaskSizes
from magi_compile.masks.program.program import MaskProgram

logger = logging.getLogger("magi_compile")

_THREADS = 256  # of a thread block
Lists = tuple[Tensor, Tensor, Tensor, Tensor]


class BitsCall(NamedTuple):
    """The parts of a call besides the addresses of tensors.

    Attributes:
        compute: gives the values of the nodes of `source.words`, from the captured tensors and ints.
        source: of the kernel.
        call: its buffers are the tensors of `source.words`, the two grids of block lists where there are some, then
            what it makes: q_ranges, k_ranges, mask_types, the bits, and a workspace. It launches nothing where there is
                no pair.
    """

    compute: Callable[[Sequence[Tensor], Sequence[int]], Values]
    source: BitsSource
    call: Call


def bits_variant(source: BitsSource, *, has_lists: bool) -> Variant:
    """The kernel to compile, of a mask with or without block lists."""
    defines, headers = {"FFA_HAS_LISTS": has_lists}, (("mask_mod.cuh", source.text),)
    rest = {"headers": headers, "may_spill": True, "is_exact": True}
    return Variant.of("masks/mask_bits.cu", "ffa_mask_bits", defines, **rest)


def mask_bits_on_device(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    listed: Listed | None,
    device: torch.device,
) -> Lists | None:
    """The slices of a mask_mod with bit blocks on a GPU, on torch's current stream; nothing waits for the device.

    Where data mean nothing to the mask_mod, or block lists contradict it, a later call raises `MaskDataError`.

    Args:
        program: the mask, with the text of its mask_mod.
        tables: the captured tensors, on `device` (scalars may be elsewhere).
        symbols: the captured ints.
        sizes: of the mask.
        listed: the block lists beside it.
        device: where to compute.

    Returns:
        q_ranges, k_ranges, mask_types and bits, of `sizes.num_blocks` slices; the n-th one has bit block n, if any.
        None where the mask_mod does what CUDA is not generated for: then tensor operations evaluate it.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    raise_pending()
    with on_device(device):
        try:
            given, prepared = prepare(program, tables, symbols, sizes, listed, device)
        except UnknownOperation as unknown:
            _note(program, str(unknown))
            return None
        q_ranges, k_ranges, mask_types, bits, _ = prepared.call.run(given, device)
    return q_ranges, k_ranges, mask_types, bits


def begin_mask_bits(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    device: torch.device,
    *,
    has_lists: bool,
) -> None:
    """Begins to compile what `mask_bits_on_device` launches for arguments like these, of which tensors may be fake.
    Raises UnknownOperation where it launches nothing."""
    key = (program, tuple([(x.dtype, x.device, x.shape, x.stride()) for x in tables]), has_lists)
    if key in _begun:  # a graph asks several times, and tracing takes longer than all else here
        return
    if len(_begun) >= _MAX_PREPARED:
        _begun.clear()
    _begun.add(key)
    source = bits_source(mask_graph(program.functions["mask"], tables, device), program.names)
    ahead.begin([bits_variant(source, has_lists=has_lists)])


_begun: set[Any] = set()


@lru_cache(maxsize=1024)
def _note(program: MaskProgram, unknown: str) -> None:
    """Once for a mask: why it takes many launches."""
    logger.info(
        "`%s` is evaluated by tensor operations: there is no kernel of %s", program, unknown
    )


_prepared: dict[Any, BitsCall | UnknownOperation] = {}
_MAX_PREPARED = 4096


def prepare(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    listed: Listed | None,
    device: torch.device,
) -> tuple[list[Tensor], BitsCall]:
    """Prepares a call for the layouts of its tensors, or finds the one prepared before.

    Args:
        program: the mask.
        tables: the captured tensors.
        symbols: the captured ints.
        sizes: of the mask.
        listed: the block lists beside the mask_mod; None where there are none.
        device: where the mask is evaluated.

    Returns:
        The tensors of the call, some of them computed here, and the prepared call.

    Raises:
        UnknownOperation: the mask_mod does what CUDA is not generated for.
    """
    how = None if listed is None else (listed.partial.shape, *listed[2:])
    layouts = tuple([(x.dtype, x.device, x.shape, x.stride()) for x in tables])
    key = (program, layouts, tuple(symbols), sizes, how, device)
    found = _prepared.get(key)
    if found is None:
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        try:
            found = _prepare(program, tables, symbols, sizes, listed, device)
        except UnknownOperation as unknown:
            found = unknown
        _prepared[key] = found
    if isinstance(found, UnknownOperation):
        raise found
    values = found.compute(tables, symbols)
    given = [_on(values[x.node], device) for x in found.source.words if isinstance(x, NodeWords)]
    return [*given, *_grids(listed)], found


def _on(table: Tensor, device: torch.device) -> Tensor:
    """A tensor as the kernel reads it: scalars on `device`."""
    return table if table.dim() else table.to(device)


def _grids(listed: Listed | None) -> list[Tensor]:
    if listed is None:
        return []
    return [x.expand_as(listed.partial).contiguous() for x in (listed.partial, listed.full)]


def _prepare(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    listed: Listed | None,
    device: torch.device,
) -> BitsCall:
    graph = mask_graph(program.functions["mask"], tables, device)
    source = bits_source(graph, program.names)
    compute = graph.computing([word.node for word in source.words])
    values = compute(tables, symbols)
    words: list[int | Pointer] = []
    num_tables = 0
    for word in source.words:
        if isinstance(word, NumberWord):
            words.append(_number(values[word.node], word.dtype))
            continue
        table = _on(values[word.node], device)
        words.append(Pointer(num_tables))
        num_tables += 1
        words += [x for pair in zip(table.shape, table.stride(), strict=True) for x in pair]
    checks = [check.words_at_pair for check in source.checks]
    checks += [] if listed is None else [IS_FULL]
    words += [*flag_addresses(device, checks), 0]
    first_made = num_tables + (0 if listed is None else 2)
    count, num_found = sizes.num_blocks, 2 * len(checks)
    shapes = ((count, 2), (count, 2), (count,), (count + 1, BLOCK, WORDS), (num_found + 2,))
    zeros = (0, 0, 0, 0, num_found + 2)
    made = [Buffer.of(x, torch.int32, zeros=n) for x, n in zip(shapes, zeros, strict=True)]
    if not count:
        return BitsCall(compute, source, Call(tuple(made), ()))
    sizes.totals  # noqa: B018  (raises where there are too many rows or keys)
    pointers = [Pointer(first_made + i) for i in range(4)]
    fixed = {
        **dict(zip(("q_ranges", "k_ranges", "mask_types", "bits"), pointers, strict=True)),
        "found": Pointer(first_made + 4),
        "num_done": Pointer(first_made + 4, 4 * num_found),
        "heads_q": sizes.heads.q,
        "heads_kv": sizes.heads.kv,
        "seqlen_q": sizes.seqlen_q,
        "seqlen_k": sizes.seqlen_k,
        **_list_fields(listed, num_tables),
    }
    params = mask_mod_params(len(words)).pack(fixed=fixed, words=words)
    function = load_function(bits_variant(source, has_lists=listed is not None), device.index)
    launch = Launch(function, count, _THREADS, params, shared_bytes=0)
    return BitsCall(compute, source, Call(tuple(made), (launch,)))


def _list_fields(listed: Listed | None, first: int) -> dict[str, Any]:
    """The fields of the parameters that are about block lists, whose grids are buffers from `first` on."""
    if listed is None:
        names = ("list_batch", "list_heads", "list_rows", "list_keys")
        return {"partial": None, "full": None, **dict.fromkeys(names, 1)}
    return {
        "partial": Pointer(first),
        "full": Pointer(first + 1),
        "list_batch": listed.partial.shape[0],
        "list_heads": listed.partial.shape[1],
        "list_rows": listed.rows,
        "list_keys": listed.keys,
    }


def _number(value: int, dtype: torch.dtype) -> int:
    """A number among the words."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        if not info.min <= value <= info.max:
            raise UnknownOperation(f"{value} in {dtype}")
    return value % 2**64
