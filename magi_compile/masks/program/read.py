"""From a mask_mod, a function of Python, to its program: it is called once, and what it did is read.

A training step makes the mask of the step before, of other documents: what did the same before is not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from magi_compile import _compat
from magi_compile.functions.names import INDICES
from magi_compile.functions.record import Recording, UnreadableError, record
from magi_compile.functions.structure import structure_of
from magi_compile.masks.errors import UnsupportedMaskError
from magi_compile.masks.program.program import MaskProgram
from magi_compile.masks.program.trace import read_with_care

MaskMod = Callable[[Any, Any, Any, Any], Any]

MAX_PROGRAMS = 256

# Of recent mask_mods, by what these did.
_programs: dict[Hashable, MaskProgram] = {}

# Not what is derived of them, which may print as it likes. Slices print what they hold, which is one of these.
_PRINTABLE = frozenset(
    {Node, bool, int, float, complex, str, slice, torch.dtype, torch.device, type(None), type(...)}
)


class TracedMask(NamedTuple):
    """A mask_mod as a program, with what it captures.

    Attributes:
        program: what it shows.
        tables: the captured tensors, in the order of their numbers in the program.
        watched: every tensor that it looked at, whose change may change the mask.
    """

    program: MaskProgram
    tables: list[Tensor]
    watched: list[Tensor]


def trace_mask_mod(mask_mod: MaskMod, device: torch.device | str = "cpu") -> TracedMask:
    """`read_mask_mod`, of a mask that has key intervals that all heads share. Raises UnsupportedMaskError with all
    reasons why it has none."""
    traced = read_mask_mod(mask_mod, device)
    traced.program.require_one_mask()
    return traced


def read_mask_mod(mask_mod: MaskMod, device: torch.device | str = "cpu") -> TracedMask:
    """Calls `mask_mod(b, h, q, kv)` once, with symbols for tensors on `device`: the program, whose `refusals` say why
    it has no key intervals, and its tensors. Raises UnsupportedMaskError where the mask_mod asks for the value of what
    it is called with, or what it does cannot be followed."""
    device = torch.device(device)
    structure = structure_of(mask_mod)
    key = None if structure is None else (structure.key, device, torch.get_default_dtype())
    if structure is not None and (known := _structures.get(key)) is not None:
        tables = [structure.tensors[place] for place in known.places]
        return TracedMask(known.program, tables, [*tables])
    index = torch.empty((), dtype=torch.int64, device="meta")
    with _compat.outside_of_modes():
        try:
            recording = record(mask_mod, dict.fromkeys(INDICES, index), device, "mask_mod")
        except UnreadableError as error:
            raise UnsupportedMaskError([str(error)]) from error
        traced, is_kept = _read(recording)
    if structure is not None and is_kept and not recording.has_read:
        _remember(key, structure.tensors, traced)
    return traced


class _Known(NamedTuple):
    """The program of a structure, and which of its tensors are the tables."""

    program: MaskProgram
    places: list[int]


# Of recent mask_mods that asked for nothing that is in their tensors.
_structures: dict[Hashable, _Known] = {}


def _remember(key: Hashable, tensors: Sequence[Tensor], traced: TracedMask) -> None:
    places = {id(x): place for place, x in enumerate(tensors)}
    if any(id(x) not in places for x in (*traced.tables, *traced.watched)):
        return  # it makes some itself
    if len(_structures) >= MAX_PROGRAMS:
        _structures.clear()
    _structures[key] = _Known(traced.program, [places[id(x)] for x in traced.tables])


def _read(recording: Recording) -> tuple[TracedMask, bool]:
    """The mask, and whether other data have the same program."""
    captures = recording.captures
    names = [name or f"t{i}" for i, name in enumerate(recording.names)]
    titles = names if any(recording.names) else []
    key = _key_of(recording.graph, captures, titles)
    program = None if key is None else _programs.get(key)
    is_kept = program is not None
    if program is None:
        program, has_failed = read_with_care(recording.graph, captures, titles)
        is_kept = key is not None and not has_failed
        if is_kept:
            _programs[key] = program
            for oldest in list(_programs)[:-MAX_PROGRAMS]:
                _programs.pop(oldest, None)
    return TracedMask(program, captures, recording.watched), is_kept


def _key_of(graph: Graph, captures: Sequence[Tensor], names: Sequence[str]) -> Hashable | None:
    """The key of a program, made of all its inputs: graphs with equal keys have one program. None where an argument of
    a call is something that is not known to print all that it is."""
    if any(x.layout != torch.strided for x in captures):
        return None
    nodes = []
    for node in graph.nodes:
        known = True

        def check(x: Any) -> None:
            nonlocal known
            known = known and type(x) in _PRINTABLE

        torch.fx.node.map_aggregate((node.args, node.kwargs), check)
        if not known:
            return None
        nodes.append((node.op, node.target, repr(node.args), repr(node.kwargs)))
    kinds = [(x.dtype, x.shape, x.stride(), x.device) for x in captures]
    return tuple(nodes), tuple(kinds), tuple(names), torch.get_default_dtype()
