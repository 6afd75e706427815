"""The functions of a score program: what a score_mod does, as ATen operations of numbers,
and its derivatives by PyTorch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from magi_compile import _compat
from magi_compile.functions.names import first_line, is_in_place, name_of
from magi_compile.functions.text import SourceError, function_text, in_ops
from magi_compile.score.evaluate import on_grid
from magi_compile.score.program import ScoreProgram, UnsupportedScoreModError

_INDEX = torch.ops.aten.index.Tensor


def refuse(reason: str) -> NoReturn:
    """Raises UnsupportedScoreModError."""
    raise UnsupportedScoreModError(f"score_mod is no pointwise function: {reason}")


def derive(body: GraphModule, given: list[Tensor], num_symbols: int, mode: Any) -> str:
    """The code of a `ScoreProgram`: of `body`, a function of the arguments, the tensors that it looks values up in,
    and `num_symbols` ints. `given` is an example of each argument and each tensor, of `mode`, a `symbolic_fake_mode`.
    Raises UnsupportedScoreModError where it is no pointwise function."""
    symbols = [_compat.symbolic_int(mode, f"s{i}") for i in range(num_symbols)]
    whole = _traced(body, [*given, *symbols], mode)
    _clean(whole)
    names = [node.target for node in body.graph.find_nodes(op="placeholder")]
    for node, name in zip(whole.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = node.target = name
    texts, looks = _take_look_ups(whole)
    _check_numbers(whole)
    value = whole.graph.output_node().args[0]
    texts.append(_text("score", value))
    inputs = whole.graph.find_nodes(op="placeholder")
    examples = dict(zip((*names, *looks), (*given, *symbols, *looks.values()), strict=True))
    taken = [node for node in inputs if node.name not in names or not node.name.startswith("t")]
    texts += _derivatives(whole, inputs, taken, examples, mode)
    code = "".join(texts)
    _try_out(code, examples, mode)
    return code


def _traced(function: Callable[..., Any], arguments: list[Any], mode: Any) -> GraphModule:
    def traced(*args: Any) -> Any:
        with in_ops():
            return function(*args)

    try:
        return _compat.traced_to_aten(traced, arguments, mode)
    except UnsupportedScoreModError:
        raise
    except Exception as error:
        refuse(f"it cannot be followed: {first_line(error)}")


def _clean(gm: GraphModule) -> None:
    """Takes out what has to do with autograd, and operations in place, which PyTorch's own formulas have."""
    for node in list(gm.graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
        elif is_in_place(node):
            plain = getattr(torch.ops.aten, name_of(node.target))
            node.target = getattr(plain, node.target._overloadname)
            changed, later = node.args[0], node.next
            while later.op != "root":
                later.replace_input_with(changed, node)
                later = later.next
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _take_look_ups(whole: GraphModule) -> tuple[list[str], dict[str, Tensor]]:
    """Replaces what the graph looks up in its tensors by inputs. Returns the functions of their indices, and an
    example of each, by name."""
    graph = whole.graph
    texts: list[str] = []
    examples: dict[str, Tensor] = {}
    last = graph.find_nodes(op="placeholder")[-1]
    found: dict[Any, Node] = {}

    def replace(node: Node, table: Node, indices: Sequence[Any]) -> None:
        nonlocal last
        key = (table, *indices)
        if key not in found:
            name = f"l{len(found)}_{table.name}"
            texts.extend(_text(f"{name}_{dim}", index) for dim, index in enumerate(indices))
            with graph.inserting_after(last):
                last = found[key] = graph.placeholder(name)
            examples[name] = last.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(found[key])

    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name.startswith("t") and not node.meta["val"].shape:
            if node.users:
                replace(node, node, ())
        elif node.target is _INDEX and not node.meta["val"].shape:
            table, indices = _index_of(node)
            if table is not None and table.op == "placeholder":
                replace(node, table, indices)
    graph.eliminate_dead_code()
    graph.lint()
    whole.recompile()
    return texts, examples


def _index_of(node: Node) -> tuple[Any, list[Any]]:
    """A tensor, and the index of a number in it, where that is looked up dimension by dimension."""
    arguments: Any = node.args
    table, indices = arguments[0], list(arguments[1])
    while table.target is _INDEX and all(
        x is None or not x.meta["val"].shape for x in table.args[1]
    ):
        outer = list(table.args[1])
        outer += [None] * (len(table.args[0].meta["val"].shape) - len(outer))
        places = [dim for dim, x in enumerate(outer) if x is None]
        for dim, index in zip(places, indices, strict=False):
            outer[dim] = index
        table, indices = table.args[0], outer
    return table, indices


def _check_numbers(whole: GraphModule) -> None:
    """Refuses what is not a number for each pair."""
    for node in whole.graph.nodes:
        if node.op == "output":
            (result,) = node.all_input_nodes or (None,)
            if result is None or not isinstance(result.meta["val"], Tensor):
                refuse("it returns no tensor")
            dtype = result.meta["val"].dtype
            if dtype not in (torch.float32, torch.float64):
                # FlexAttention goes on in that dtype in eager code, and in fp32 where it is compiled.
                refuse(f"it returns {dtype}; convert the new score to torch.float32")
        elif node.op == "placeholder":
            if node.users and node.name.startswith("t"):
                user = next(iter(node.users))
                refuse(f"`{name_of(user.target)}` takes a whole captured tensor for each pair")
        elif node.op != "call_function":
            refuse(f"`{node.op} {node.target}` in its graph")
        elif isinstance(node.meta.get("val"), Tensor) and node.meta["val"].shape:
            shape = list(node.meta["val"].shape)
            refuse(f"`{name_of(node.target)}` gives a tensor of shape {shape} for each pair")


def _derivatives(
    whole: GraphModule,
    inputs: list[Node],
    taken: list[Node],
    examples: dict[str, Any],
    mode: Any,
) -> list[str]:
    """The functions of the gradients."""
    wanted = [
        i
        for i, node in enumerate(taken)
        if node.name == "score"
        or (node.name.startswith("l") and node.meta["val"].is_floating_point())
    ]
    interpreter = torch.fx.Interpreter(whole)

    def gradients(g: Tensor, *values: Any) -> Any:
        leaves = list(values)
        for i in wanted:
            leaves[i] = values[i].detach().requires_grad_()
        by_name = dict(zip((node.name for node in taken), leaves, strict=True))
        with torch.enable_grad():
            out = interpreter.run(*(by_name.get(node.name) for node in inputs))
            result = out.float() if out.requires_grad else None
        if result is None:
            return [None for _ in wanted]
        leaves = [leaves[i] for i in wanted]
        return list(torch.autograd.grad(result, leaves, g, allow_unused=True))

    arguments = [torch.empty_like(examples["score"]), *(examples[node.name] for node in taken)]
    joint = _traced(gradients, arguments, mode)
    _clean(joint)
    names = ["g", *(node.name for node in taken)]
    for node, name in zip(joint.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = node.target = name
    results: Any = joint.graph.output_node().args[0]
    return [
        _text(f"d_{taken[i].name}", result)
        for i, result in zip(wanted, results, strict=True)
        if result is not None
    ]


def _text(name: str, result: Any) -> str:
    if not isinstance(result, Node):
        return f"def {name}():\n    return {result!r}\n"
    try:
        return function_text(name, result)
    except SourceError as error:
        refuse(str(error))
        raise


def _try_out(code: str, examples: dict[str, Any], mode: Any) -> None:
    """Refuses now what torch.vmap has no rule for."""
    values: dict[str, Any] = {}
    with mode:
        for name, x in examples.items():
            values[name] = x.new_empty(2, 2, 2) if isinstance(x, Tensor) else 8
    values["g"] = values["score"]
    for name, function in ScoreProgram("", code).functions.items():
        try:
            with mode, torch.no_grad(), _compat.vmap_in_ops():
                on_grid(function, values)
        except Exception as error:
            refuse(f"`{name}` cannot be evaluated for many pairs: {first_line(error)}")
