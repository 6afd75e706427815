"""Dynamo: what it traces now, how it calls things, and the graphs that it gives to a backend."""

from __future__ import annotations

import re
import sys
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from magi_compile._compat.tracing import is_fake


def copy_of_dynamo_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph that Dynamo gave to a backend, for changes that Dynamo must not see:
    with all that AOTAutograd reads of it."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = graph.graph_copy(gm.graph, copies, return_output_node=True)
    graph.output(output[0])  # type: ignore[index]
    for node, copied in copies.items():
        if hasattr(node, "_dynamo_source"):
            copied._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    copied_gm = torch.fx.GraphModule(gm, graph)
    for name, value in vars(gm).items():
        vars(copied_gm).setdefault(name, value)
    copied_gm.meta = dict(gm.meta)
    return copied_gm


def mark_as_without_source(placeholder: torch.fx.Node) -> None:
    """Says that an input of a Dynamo graph is nothing that Dynamo gave it."""
    placeholder._dynamo_source = None  # type: ignore[attr-defined]


def example_of_input(placeholder: torch.fx.Node) -> Tensor | None:
    """The tensor that Dynamo was called with for a placeholder of its graph, while it compiles; None for other inputs,
    and where it traces tensors that have no values."""
    example = getattr(placeholder.meta.get("grapharg"), "example", None)
    return example if isinstance(example, Tensor) and not is_fake(example) else None


def source_name(placeholder: torch.fx.Node) -> str:
    """The name in the user's program of a placeholder of a Dynamo graph, or the placeholder's own name."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return placeholder.name
    name = source.name() if callable(source.name) else source.name  # a property since torch 2.12
    captured = re.fullmatch(r"(.*)\.__closure__\[(\d+)\]\.cell_contents", name)
    if captured is not None:
        function = _value_of_source(captured[1])
        if isinstance(function, FunctionType):
            return function.__code__.co_freevars[int(captured[2])]
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\b__import_\w+\.", "", name)  # a global of another module
    return re.sub(r"^___from_numpy\((.*)\)$", r"\1", name)


def _value_of_source(name: str) -> Any:
    """The value of Dynamo's source `name`, as in guards of the frame that it compiles now; None where it is not
    known."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame = InstructionTranslator.current_tx().output.root_tx
        return eval(name, {"L": frame.f_locals, "G": frame.f_globals})
    except Exception:  # outside of Dynamo, or of a source that only guards know
        return None


def expect_other_lengths(tensor: Tensor) -> None:
    """Has Dynamo compile a graph with `tensor` as an input for any length of it, from the first time on."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def backend_that_dynamo_traces_for() -> Any:
    """The backend that will compile what Dynamo traces now; None outside of Dynamo, and for torch.export."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None


def traces_inner_graph() -> bool:
    """True if Dynamo traces the body of an operator now (a checkpointed region), not the graph around it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.current_tracer.parent is not None
    except AttributeError:
        return False


def backends_around() -> list[Any]:
    """The backends of the functions compiled by torch.compile that are being called right now, innermost first."""
    from torch._dynamo.eval_frame import OptimizeContext

    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            context = frame.f_locals.get("self")
            if isinstance(context, OptimizeContext):
                found.append(context.callback)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def layers_of(backend: Any) -> tuple[list[Any], dict[str, Any]]:
    """The layers that Dynamo and torch.compile have wrapped around a backend, outermost first, and the `options` that
    torch.compile was given."""
    layers: list[Any] = []
    options: dict[str, Any] = {}
    # Dynamo's are called by the second name in older versions.
    dynamo = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
    links = (*dynamo, "compiler_fn", "backend_compile_fn", "func", "__self__")
    while backend is not None and not any(backend is layer for layer in layers):
        layers.append(backend)
        options = options or (getattr(backend, "kwargs", None) or {}).get("options") or {}
        inner = (getattr(backend, link, None) for link in links)
        backend = next((layer for layer in inner if layer is not None), None)
    return layers, options


def without_disable(function: Any) -> Any:
    """The function that `torch._dynamo.disable` wraps, for a caller that Dynamo has been told to leave alone already;
    other functions as they are."""
    is_disabled = getattr(function, "_torchdynamo_disable", False)
    return function._torchdynamo_orig_callable if is_disabled else function


def graph_breaks() -> list[str]:
    """The reasons of graph breaks so far, each once: its first line."""
    reasons = [
        text.partition("Explanation:")[2] for text in torch._dynamo.utils.counters["graph_break"]
    ]
    lines = (reason.strip().split("\n")[0].rstrip(".") for reason in reasons)
    return list(dict.fromkeys(line for line in lines if line))


def num_graph_breaks() -> int:
    """The number of graph breaks so far in this process."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def num_compiled_graphs() -> int:
    """The number of graphs that Dynamo has compiled so far in this process, recompilations included."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def as_user_error(error: Exception) -> Exception:
    """`error`, also of its own class, so that Dynamo hands it to the user as it is: others it takes for defects, its
    own or of a backend, and asks to report them."""
    of: Any = type(error)
    return _user_error_type(of)(*error.args, first_useful_frame=None)


@cache
def _user_error_type(of: Any) -> Any:
    from torch._dynamo.exc import ShortenTraceback

    class UserError(ShortenTraceback, of):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.text = str(args[0])

        def __str__(self) -> str:
            return self.text  # not what Dynamo adds for those who report defects

    UserError.__name__ = UserError.__qualname__ = of.__name__
    return UserError
