"""Mask programs by `csrc/sm90/masks`: what `row_intervals`, `padded_slices_from_intervals` and `BlockLists.checks`
give, in two launches or one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from magi_compile._checks import flag_addresses, raise_pending
from magi_compile.kernels.sm90.masks.list_fields import check_lists, list_fields
from magi_compile.kernels.sm90.masks.source import ELEMENTS, MaskSource, mask_source
from magi_compile.kernels.sm90.params import BLOCK_LISTS, mask_program_params
from magi_compile.kernels.sm90.runtime import ahead
from magi_compile.kernels.sm90.runtime.calls import Buffer, Call, Launch
from magi_compile.kernels.sm90.runtime.driver import load_function, max_resident_blocks, on_device
from magi_compile.kernels.sm90.runtime.nvrtc import Variant
from magi_compile.kernels.sm90.runtime.structs import Pointer
from magi_compile.masks.evaluation import messages as preconditions
from magi_compile.masks.evaluation.block_lists import HOLDS_ALL, IS_FULL, BlockLists, broadcast
from magi_compile.masks.evaluation.evaluate import Evaluation, check_look_up, with_columns
from magi_compile.masks.evaluation.row_intervals import RowIntervals, check_arguments
from magi_compile.masks.evaluation.sizes import MaskSizes
from magi_compile.masks.expr.integers import INT64
from magi_compile.masks.program.program import MaskProgram
from magi_compile.plan.padding import size_to_sort

_THREADS, _LISTS_THREADS = 512, 256  # of a thread block


class Workspace(NamedTuple):
    """Offsets in the memory that a call works in, in int32s. What the checks of the mask found begins at 0.

    Attributes:
        found: two numbers of 8 bytes, the places that the check of block lists found.
        num_done: how many thread blocks are done with block lists.
        num_arrived: how many thread blocks have come to `wait_for_grid`.
        intervals: of the rows. All in front of them is zero when the first kernel starts.
        scratch: what the kernel works in.
        end: the size.
    """

    found: int
    num_done: int
    num_arrived: int
    intervals: int
    scratch: int
    end: int


class SlicesCall(NamedTuple):
    """The parts of a call besides the addresses of tensors.

    Attributes:
        sizes: of the mask.
        source: of the kernel.
        workspace: what lies where in the last tensor that the call makes.
        call: its buffers are the captured tensors, two tensors for each kind of block lists, then what it makes:
            q_ranges, k_ranges, mask_types and the workspace. It launches nothing where there is no row or no key.
    """

    sizes: MaskSizes
    source: MaskSource
    workspace: Workspace
    call: Call

    def intervals(self, memory: Tensor) -> RowIntervals:
        """The key intervals that the slices are made of, without checks; `memory` is the workspace."""
        sizes = self.sizes
        shape = (2, self.source.num_lanes, sizes.entries, sizes.seqlen_q)
        lo, hi = memory[self.workspace.intervals : self.workspace.scratch].view(shape)
        return RowIntervals(lo, hi, sizes.seqlen_k, (), sizes.heads)


class MaskResult(NamedTuple):
    """The slices of a mask, `(q_ranges, k_ranges, mask_types)`, and the tensors that its program reads: the captured
    ones and those computed."""

    lists: tuple[Tensor, Tensor, Tensor]
    tables: list[Tensor]


def mask_variant(source: MaskSource) -> Variant:
    """The kernel to compile."""
    headers = (("mask_program.cuh", source.text),)
    return Variant("masks/mask_slices.cu", "ffa_mask_slices", headers=headers, may_spill=True)


@cache
def lists_variant() -> Variant:
    """The kernel that compares block lists with the mask."""
    return Variant("masks/block_lists.cu", "ffa_block_lists")


def mask_slices_on_device(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    capacity: int,
    device: torch.device,
    blocks: BlockLists | None = None,
    block_size: Sequence[int] = (),
) -> MaskResult:
    """The slices of a mask program on a GPU, on torch's current stream; nothing waits for the device.

    Where a check fails all slices are empty; a later call raises `MaskDataError`.

    Args:
        program: the mask.
        tables: the captured tensors, integer or bool, on `device` (scalars may be elsewhere).
        symbols: the captured ints.
        sizes: of the mask.
        capacity: how many slices there is room for.
        device: where to compute.
        blocks: block lists that must agree with the mask.
        block_size: how many rows and keys one of their blocks has.

    Returns:
        `capacity` slices, those left over empty.

    Raises:
        UnsupportedMaskError: intervals cannot express the mask.
        TypeError: a table has the wrong dtype.
        ValueError: too few tables or symbols, a table or a list with the wrong device or shape, or too many rows.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    raise_pending()
    with on_device(device):
        given, prepared = prepare(
            program, tables, symbols, sizes, capacity, device, blocks, tuple(block_size)
        )
        q_ranges, k_ranges, mask_types, _ = prepared.call.run(given, device)
    num_tables = len(given) - (2 * len(blocks.kinds) if blocks else 0)
    return MaskResult((q_ranges, k_ranges, mask_types), given[:num_tables])


def begin_mask_slices(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    device: torch.device,
    *,
    has_lists: bool,
) -> None:
    """Begins to compile what `mask_slices_on_device` launches for arguments like these; tensors may be fake."""
    tables = with_columns(program, tables, symbols, sizes, device)
    dtypes = tuple(_readable(table, device).dtype for table in tables)
    source = mask_source(program, program.keys(sizes.seqlen_k, symbols), dtypes)
    ahead.begin([mask_variant(source), *([lists_variant()] if has_lists else [])])


_prepared: dict[Any, SlicesCall] = {}
_MAX_PREPARED = 4096


def prepare(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    capacity: int,
    device: torch.device,
    blocks: BlockLists | None = None,
    block_size: tuple[int, ...] = (),
) -> tuple[list[Tensor], SlicesCall]:
    """The tensors that the call is given, some of them computed here, and what it needs for their layouts."""
    tables = with_columns(program, tables, symbols, sizes, device)
    tables = [_readable(table, device) for table in tables]
    lists = [_as_int32(x) for kind in blocks.kinds for x in kind] if blocks else []
    given = [*tables, *lists]
    layouts = tuple([(x.dtype, x.device, x.shape, x.stride()) for x in given])
    key = (program, len(tables), layouts, tuple(symbols), sizes, capacity, device, block_size)
    found = _prepared.get(key)
    if found is None:
        if len(_prepared) >= _MAX_PREPARED:
            _prepared.clear()
        blocks = BlockLists(*lists) if blocks else None
        found = _prepare(program, tables, symbols, sizes, capacity, device, blocks, block_size)
        _prepared[key] = found
    return given, found


def _as_int32(indices: Tensor) -> Tensor:
    return indices if indices.dtype == torch.int32 else indices.to(torch.int32)


def _readable(table: Tensor, device: torch.device) -> Tensor:
    """A captured tensor as the kernel reads it: scalars on `device`, other integers as int64."""
    if not table.dim():
        table = table.to(device)
    is_number = not (table.is_floating_point() or table.is_complex())
    return table.to(torch.int64) if is_number and table.dtype not in ELEMENTS else table


def _prepare(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: MaskSizes,
    capacity: int,
    device: torch.device,
    blocks: BlockLists | None,
    block_size: tuple[int, ...],
) -> SlicesCall:
    check_arguments(program, tables, symbols, device)
    if capacity < 0:
        raise ValueError(f"`capacity` must not be negative, got {capacity}")
    num_rows, _ = sizes.totals
    if (places := sizes.entries * sizes.seqlen_k) >= 2**31:
        raise ValueError(f"`batch * heads * seqlen_k` must be below 2**31, got {places}")
    keys = program.keys(sizes.seqlen_k, symbols)
    source = mask_source(program, keys, tuple(table.dtype for table in tables))
    num_indexes = sum(source.num_indexes(sizes.batch, sizes.heads.q))
    workspace = _workspace(source, sizes.seqlen_k, capacity, num_rows, num_indexes)
    shapes = ((capacity, 2), (capacity, 2), (capacity,), (workspace.end,))
    if sizes.is_empty:
        made = [Buffer.of(x, torch.int32, zeros=torch.Size(x).numel()) for x in shapes]
        return SlicesCall(sizes, source, workspace, Call(tuple(made), ()))
    for look_up in source.look_ups:
        shape = tables[look_up.args[0]].shape
        check_look_up(look_up, program.describe(look_up), shape, sizes)
    words = _numbers(program, source, tuple(symbols), device)
    words += _table_words(source, tables)
    checks = [made.describe([x.shape for x in tables]) for made in source.checks]
    words += flag_addresses(device, [*checks, preconditions.fits(capacity)])
    first_made = len(tables) + (2 * len(blocks.kinds) if blocks else 0)
    q_ranges, k_ranges, mask_types = (Pointer(first_made + i) for i in range(3))

    def in_workspace(offset: int) -> Pointer:
        return Pointer(first_made + 3, 4 * offset)

    shared = {
        "q_ranges": q_ranges,
        "k_ranges": k_ranges,
        "mask_types": mask_types,
        "intervals": in_workspace(workspace.intervals),
        "broken": in_workspace(0),
        "batch": sizes.batch,
        "seqlen_q": sizes.seqlen_q,
        "seqlen_k": sizes.seqlen_k,
        "capacity": capacity,
        "heads": sizes.heads.q,
        "heads_per_group": sizes.heads.group,
    }
    fixed = {
        **shared,
        "scratch": in_workspace(workspace.scratch),
        "num_arrived": in_workspace(workspace.num_arrived),
    }
    params = mask_program_params(len(words)).pack(fixed=fixed, words=words)
    function = load_function(mask_variant(source), device.index)
    num_items = max(num_rows * max(source.num_lanes, 1), sizes.seqlen_k if num_indexes else 0)
    most = max_resident_blocks(function, _THREADS, device.index)
    num_blocks = min(-(-num_items // _THREADS), most)
    options = {"shared_bytes": _THREADS // 32 * 4, "is_cooperative": True}
    launches = [Launch(function, num_blocks, _THREADS, params, **options)]
    if blocks:
        fields = {
            **shared,
            "found": in_workspace(workspace.found),
            "num_done": in_workspace(workspace.num_done),
            "num_lanes": source.num_lanes,
            "num_checks": len(source.checks),
        }
        launches.append(_lists_launch(fields, sizes, device, blocks, block_size, len(tables)))
    zeros = (0, 0, 0, workspace.intervals)
    made = [Buffer.of(x, torch.int32, zeros=n) for x, n in zip(shapes, zeros, strict=True)]
    return SlicesCall(sizes, source, workspace, Call(tuple(made), tuple(launches)))


def _workspace(
    source: MaskSource, seqlen_k: int, capacity: int, num_rows: int, num_indexes: int
) -> Workspace:
    num_places = source.num_lanes * num_rows
    num_sorted = size_to_sort(seqlen_k)
    num_index = _even(4 * seqlen_k + num_sorted + -(-seqlen_k // 32) + 1)
    num_scratch = 4 * capacity + 2 * -(-num_places // 32) + num_indexes * num_index
    found = _even(len(source.checks))
    num_done = found + 4
    num_arrived = num_done + 1
    intervals = num_arrived + 1
    scratch = intervals + 2 * num_places
    return Workspace(found, num_done, num_arrived, intervals, scratch, scratch + num_scratch)


def _lists_launch(
    fields: dict[str, Any],
    sizes: MaskSizes,
    device: torch.device,
    blocks: BlockLists,
    block_size: tuple[int, ...],
    first_buffer: int,
) -> Launch:
    """Compares block lists with the intervals. `fields` are those of its parameters that the lists do not say; the
    lists are buffers from `first_buffer` on."""
    rows, keys = block_size
    num_q = -(-sizes.seqlen_q // rows)
    blocks.check_lengths(num_q)
    blocks.check_heads(sizes.heads.q)
    kinds: dict[str, dict[str, Any]] = {}
    for number, (name, kind) in enumerate(itertools.zip_longest(("partial", "full"), blocks.kinds)):
        if kind is not None:
            check_lists(kind, sizes.batch, device)
        layouts = kind and [(x.shape, x.stride()) for x in broadcast(kind, num_q)]
        kinds[name] = list_fields(layouts, first_buffer + 2 * number, sizes.batch)
    params = BLOCK_LISTS.pack(
        **fields,
        flags=flag_addresses(device, [HOLDS_ALL, IS_FULL]),
        **kinds,
        block_rows=rows,
        block_keys=keys,
    )
    function = load_function(lists_variant(), device.index)
    shared_bytes = _LISTS_THREADS // 32 * 4
    num_blocks = sizes.entries * num_q
    return Launch(function, num_blocks, _LISTS_THREADS, params, shared_bytes=shared_bytes)


def _table_words(source: MaskSource, tables: Sequence[Tensor]) -> Iterator[int | Pointer]:
    """The address of each captured tensor, then its sizes and strides."""
    for place in source.tables:
        table = tables[place.table]
        yield Pointer(place.table)
        for dim in range(place.num_dims):
            yield table.shape[dim]
            yield table.stride(dim)


def _numbers(
    program: MaskProgram, source: MaskSource, symbols: tuple[int, ...], device: torch.device
) -> list[int | Pointer]:
    """The values of `source.numbers` for the captured ints."""
    run = Evaluation(program, (), symbols, MaskSizes(1, 1, 1), device)
    for expr in source.divisors:
        run.not_zero(expr, run.value(expr))
    numbers = (int(run.value(expr).data) for expr in source.numbers)
    return [min(max(number, INT64[0]), INT64[1]) % 2**64 for number in numbers]


def _even(count: int) -> int:
    """Memory of as many int32 that ends where an int64 may begin."""
    return count + count % 2
