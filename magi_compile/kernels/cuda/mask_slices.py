"""Mask programs by `csrc/sm90/masks/mask_slices.cuh`: what `row_intervals` and `padded_slices_from_intervals` give, in five
launches or fewer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver
from torch import Tensor

from magi_compile._checks import flag_addresses, raise_pending
from magi_compile.kernels.cuda.launch import check, current_stream, launch, load_function
from magi_compile.kernels.cuda.mask_source import ELEMENTS, MaskSource, mask_source
from magi_compile.kernels.cuda.nvrtc import Variant
from magi_compile.masks.evaluation import messages as preconditions
from magi_compile.masks.evaluation.evaluate import Evaluation, check_look_up, with_columns
from magi_compile.masks.evaluation.integers import INT64
from magi_compile.masks.evaluation.row_intervals import RowIntervals, check_arguments
from magi_compile.masks.evaluation.to_slices import packed_totals
from magi_compile.masks.program.program import MaskProgram

_BLOCK_THREADS = 512  # of a thread block that works on its own
_GRID_THREADS = 128
_MAX_BLOCKS = 4096
# The fields of MaskSlicesParams before and from `phase` on.
_PARAMS, _PHASE = struct.Struct("<6Q4i"), struct.Struct("<2i")
_MARK_KEYS, _INDEX_KEYS, _INTERSECT_ROWS, _MARK_ROWS, _WRITE_SLICES = range(5)


class Sizes(NamedTuple):
    """The sizes of a mask, and how many slices there is room for."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    capacity: int


class Phase(NamedTuple):
    """One launch."""

    number: int
    num_blocks: int
    num_threads: int


class Route(NamedTuple):
    """What a call needs to know besides where tensors are.

    Attributes:
        source: of the kernel.
        variant: the kernel to compile.
        words: for the kernel, without the addresses of captured tensors.
        phases: the launches; none where there is no row or no key.
        num_intervals: int32s that the intervals take.
        num_scratch: int32s that the kernel works in.
    """

    source: MaskSource
    variant: Variant
    words: tuple[int, ...]
    phases: tuple[Phase, ...]
    num_intervals: int
    num_scratch: int


class Launch(NamedTuple):
    """What the kernel is called with, and what holds the memory that `params` points to."""

    route: Route
    sizes: Sizes
    params: bytearray
    lists: tuple[Tensor, Tensor, Tensor]  # q_ranges, k_ranges, mask_types
    workspace: Tensor  # int32: what checks found, zeros at first; the intervals; scratch memory
    tables: list[Tensor]  # the captured ones and those computed

    def at(self, phase: Phase) -> bytearray:
        """`params` for one launch."""
        _PHASE.pack_into(self.params, _PARAMS.size, phase.number, 0)
        return self.params

    def intervals(self) -> RowIntervals:
        """The key intervals that the slices are made of, without checks."""
        shape = (2, self.route.source.num_lanes, self.sizes.batch, self.sizes.seqlen_q)
        first = _even(len(self.route.source.checks))
        lo, hi = self.workspace[first : first + self.route.num_intervals].view(shape)
        return RowIntervals(lo, hi, self.sizes.seqlen_k)


def mask_variant(source: MaskSource) -> Variant:
    """The kernel to compile."""
    headers = (("mask_program.cuh", source.text),)
    return Variant("masks/mask_slices.cu", "ffa_mask_slices", headers=headers, may_spill=True)


def mask_slices_on_device(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: tuple[int, int, int, int],
    device: torch.device,
) -> Launch:
    """The slices of a mask program on a GPU, on torch's current stream; nothing waits for the device.

    Where a check fails all slices are empty; a later call raises `MaskDataError`.

    Args:
        program: the mask.
        tables: the captured tensors, integer or bool, on `device` (scalars may be elsewhere).
        symbols: the captured ints.
        sizes: see `Sizes`.
        device: where to compute.

    Returns:
        What was launched: its `lists` are `sizes.capacity` slices, those left over empty.

    Raises:
        UnsupportedMaskError: intervals can not express the mask.
        TypeError: a table has the wrong dtype.
        ValueError: too few tables or symbols, a table with the wrong device or shape, or too many rows.
    """
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return mask_slices_on_device(program, tables, symbols, sizes, device)
    raise_pending()
    prepared = prepare(program, tables, symbols, Sizes(*sizes), device)
    route = prepared.route
    stream = current_stream(device)
    if route.phases:
        function = load_function(route.variant, device.index)
        if route.source.checks:
            address = prepared.workspace.data_ptr()
            check(driver.cuMemsetD32Async(address, 0, len(route.source.checks), stream))
    for phase in route.phases:
        shared_bytes = phase.num_threads // 32 * 4
        blocks, threads = phase.num_blocks, phase.num_threads
        launch(function, blocks, threads, prepared.at(phase), stream, shared_bytes=shared_bytes)
    return prepared


_routes: dict[Any, Route] = {}
_MAX_ROUTES = 4096


def prepare(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: Sizes,
    device: torch.device,
) -> Launch:
    """The memory for the slices and the parameters of the kernel, on `device`, and what the program computes itself."""
    lengths = {"b": sizes.batch, "q": sizes.seqlen_q, "kv": sizes.seqlen_k}
    tables = with_columns(program, tables, symbols, lengths, device)
    tables = [_readable(table, device) for table in tables]
    layouts = tuple((t.dtype, t.device, t.shape, t.stride()) for t in tables)
    key = (program, layouts, tuple(symbols), sizes, device)
    route = _routes.get(key)
    if route is None:
        if len(_routes) >= _MAX_ROUTES:
            _routes.clear()
        route = _routes[key] = _route(program, tables, symbols, sizes, device)
    num_checks = _even(len(route.source.checks))
    allocate = torch.empty if route.phases else torch.zeros
    q_ranges = allocate((sizes.capacity, 2), dtype=torch.int32, device=device)
    k_ranges = allocate((sizes.capacity, 2), dtype=torch.int32, device=device)
    mask_types = allocate((sizes.capacity,), dtype=torch.int32, device=device)
    num_words = num_checks + route.num_intervals + route.num_scratch
    workspace = allocate(num_words, dtype=torch.int32, device=device)
    address = workspace.data_ptr()
    words = list(route.words)
    for place in route.source.tables:
        words[place.first] = tables[place.table].data_ptr()
    fixed = _PARAMS.pack(
        q_ranges.data_ptr(),
        k_ranges.data_ptr(),
        mask_types.data_ptr(),
        address + 4 * num_checks,
        address + 4 * (num_checks + route.num_intervals),
        address,
        *sizes,
    )
    params = bytearray(fixed + bytes(_PHASE.size) + struct.pack(f"<{len(words)}q", *words))
    return Launch(route, sizes, params, (q_ranges, k_ranges, mask_types), workspace, tables)


def _readable(table: Tensor, device: torch.device) -> Tensor:
    """A captured tensor as the kernel reads it: scalars on `device`, other integers as int64."""
    if not table.dim():
        table = table.to(device)
    is_number = not (table.is_floating_point() or table.is_complex())
    return table.to(torch.int64) if is_number and table.dtype not in ELEMENTS else table


def _route(
    program: MaskProgram,
    tables: Sequence[Tensor],
    symbols: Sequence[int],
    sizes: Sizes,
    device: torch.device,
) -> Route:
    check_arguments(program, tables, symbols, device)
    if sizes.capacity < 0:
        raise ValueError(f"`capacity` must not be negative, got {sizes.capacity}")
    batch, seqlen_q, seqlen_k, capacity = sizes
    num_rows, _ = packed_totals(batch, seqlen_q, seqlen_k)
    keys = program.keys(seqlen_k, symbols)
    source = mask_source(program, keys, tuple(table.dtype for table in tables))
    variant, num_intervals = mask_variant(source), 2 * source.num_lanes * num_rows
    if 0 in (batch, seqlen_q, seqlen_k):
        return Route(source, variant, (0,) * source.num_words, (), num_intervals, 0)

    for look_up in source.look_ups:
        shape = tables[look_up.args[0]].shape
        lengths = {"b": batch, "q": seqlen_q, "kv": seqlen_k}
        check_look_up(look_up, program.describe(look_up), shape, lengths)
    words = _numbers(program, source, tuple(symbols), device)
    for place in source.tables:
        table = tables[place.table]
        words.append(0)
        for dim in range(place.num_dims):
            words += (table.shape[dim], table.stride(dim))
    shapes = [table.shape for table in tables]
    checks = [made.describe(shapes) for made in source.checks]
    words += flag_addresses(device, [*checks, preconditions.fits(capacity)])

    num_places = source.num_lanes * num_rows
    entries = [batch if "b" in keys.variables else 1 for keys in source.indexes]
    num_sorted = 1 << (seqlen_k - 1).bit_length()
    num_index = _even(4 * seqlen_k + num_sorted + -(-seqlen_k // 32) + 1)
    num_scratch = 4 * capacity + 2 * -(-num_places // 32) + sum(entries) * num_index
    phases = [
        _on_grid(_INTERSECT_ROWS, num_rows),
        _on_grid(_MARK_ROWS, num_places),
        Phase(_WRITE_SLICES, 1, _BLOCK_THREADS),
    ]
    if entries:
        index = Phase(_INDEX_KEYS, sum(entries), _BLOCK_THREADS)
        phases = [_on_grid(_MARK_KEYS, seqlen_k), index, *phases]
    return Route(source, variant, tuple(words), tuple(phases), num_intervals, num_scratch)


def _numbers(
    program: MaskProgram, source: MaskSource, symbols: tuple[int, ...], device: torch.device
) -> list[int]:
    """What the captured ints make of `source.numbers`."""
    run = Evaluation(program, (), symbols, 1, 1, 1, device)
    for expr in source.divisors:
        run.divisor(expr, run.value(expr))
    numbers = (int(run.value(expr).data) for expr in source.numbers)
    return [min(max(number, INT64[0]), INT64[1]) for number in numbers]


def _on_grid(number: int, num_items: int) -> Phase:
    return Phase(number, min(-(-num_items // _GRID_THREADS), _MAX_BLOCKS), _GRID_THREADS)


def _even(count: int) -> int:
    """Memory of as many int32 that ends where an int64 may begin."""
    return count + count % 2
