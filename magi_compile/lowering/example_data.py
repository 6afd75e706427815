"""The data that a graph is compiled with: whether its masks have intervals for them.

What intervals take for granted of captured tensors (equal values next to each other, values that do not decrease) is a
property of how a program makes its data, and so of all of them. The first ones decide which way a mask takes where
later ones could not without a wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from magi_compile import _compat
from magi_compile.functions.names import is_in_place, is_random, name_of
from magi_compile.functions.text import run
from magi_compile.lowering.emit import value_of
from magi_compile.masks import (
    MaskProgram,
    UnsupportedMaskError,
    padded_slices_from_intervals,
    row_intervals,
)
from magi_compile.masks.errors import refuse_broken
from magi_compile.masks.evaluation.sizes import MaskSizes

MAX_NODES = 64  # between the inputs of a graph and a captured tensor, which are computed for this


def order_reasons(
    program: MaskProgram,
    tables: Sequence[Node],
    symbols: Sequence[Any],
    sizes: MaskSizes,
    capacity: int,
    device: torch.device,
) -> tuple[str, ...]:
    """Reasons why the data at compile time break the order that intervals need. Waits for the device.

    The program is a mask that has intervals for data in some order, `tables` are the nodes of its captured tensors,
    and `capacity` is how many slices there is room for, on `device`. There are no reasons where data are as intervals
    need them, where they mean nothing to the mask either, and where they are not known.
    """
    if not all(isinstance(symbol, int) for symbol in symbols):
        return ()
    with _compat.without_fake_tensors(), torch.no_grad():
        known = examples_of(tables)
        if known is None:
            return ()
        try:
            intervals = row_intervals(program, known, symbols, **sizes._asdict(), device=device)
            _, fits = padded_slices_from_intervals(intervals, capacity)
            checks = [check for check in (*intervals.checks, fits) if not bool(check.ok)]
            if all(check.of_conversion for check in checks):
                refuse_broken(checks)
            return ()
        except UnsupportedMaskError as error:  # or too many intervals for these lengths
            return tuple(error.reasons)
        except (TypeError, ValueError, IndexError):  # found again, and said, when it runs
            return ()


def examples_of(nodes: Sequence[Node]) -> list[Tensor] | None:
    """The tensors that `nodes` are in the call that is being compiled; None where one of them is not known."""
    found = []
    for node in nodes:
        value = example_of(node)
        if value is None:
            return None
        found.append(value)
    return found


def example_of(node: Node) -> Tensor | None:
    """The tensor that `node` of a Dynamo graph is in the call that is being compiled; None where that is not known."""
    known: dict[Node, Any] = {}
    needed, waiting = set(), [node]
    while waiting:
        one = waiting.pop()
        if one in needed:
            continue
        needed.add(one)
        if one.op == "placeholder":
            known[one] = _compat.example_of_input(one)
            if known[one] is None:
                return None
        elif (
            one.op not in ("call_function", "call_method")
            or len(needed) > MAX_NODES
            or is_in_place(one)
            or is_random(name_of(one.target))
        ):
            return None
        waiting += one.all_input_nodes
    try:
        for one in node.graph.nodes:
            if one in needed and one not in known:
                known[one] = run(one, *torch.fx.map_arg((one.args, one.kwargs), known.__getitem__))
    except Exception:  # whatever an operation says of values that it was not traced with
        return None
    found, shape = known[node], tuple(map(_compat.size_at_hand, value_of(node).shape))
    return found if isinstance(found, Tensor) and tuple(found.shape) == shape else None
