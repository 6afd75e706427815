"""Parts of a mask_mod as Python text, and running them: for tables that expressions look up, and for the mask itself.

The text is made by FX from the mask_mod's own graph, so that it computes what PyTorch computes, in every dtype:

    def t1(q, t0):
        floor_divide = torch.floor_divide(t0[q], 3);
        return floor_divide

A function takes what it depends on: some of b, h, q and kv, captured tensors `t0, t1, ...` and captured ints
`s0, s1, ...`.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from magi_compile import _compat
from magi_compile._checks import require
from magi_compile.functions import guards
from magi_compile.functions.names import INDICES, SIGNS, name_of
from magi_compile.functions.reached import Reached

# Of torch.isin: memory for each row.
MAX_SOUGHT = 1024


class SourceError(ValueError):
    """Nodes that text cannot say."""


def sortable(x: Tensor, nan: int) -> Tensor:
    """int64 keys that compare as the floats `x` do; `nan` is the key of what is not a number."""
    bits = (x.double() + 0.0).view(torch.int64)  # -0.0 + 0.0 is 0.0
    keys = torch.where(bits < 0, bits ^ (2**63 - 1), bits)
    return torch.where(torch.isnan(x), nan, keys)


# What a text may name: FX gives the first ones to every text.
_BY_FX: dict[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "inf": float("inf"),
    "nan": float("nan"),
    "NoneType": type(None),
}
_NAMES: dict[str, Any] = {
    **_BY_FX,
    "operator": operator,
    "getattr": getattr,
    **{
        f"_operator_{name}": function for name, function in vars(operator).items() if name[0] != "_"
    },
    f"{__name__}.sortable".replace(".", "_"): sortable,
}


def function_text(name: str, result: Node) -> str:
    """The text of a function that computes the node `result` from the placeholders of its graph."""
    needed = needed_for(result)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in result.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].type = None
            if node.op != "placeholder":  # equal functions have equal texts
                copies[node].name = f"x{len(copies)}"
    graph.output(copies[result])
    code = graph.python_code("self")
    unknown = [
        key
        for key, value in code.globals.items()
        if key not in (*_BY_FX, "fx_pytree", "pytree") and _NAMES.get(key) is not value
    ]
    if unknown:
        raise SourceError(f"`{unknown[0]}` is not a function of PyTorch")
    _, signature, body = code.src.partition("def forward(self")
    arguments, colon, body = body.partition("):\n")
    assert signature and colon, code.src
    lines = (line.partition(";")[0].rstrip() for line in body.splitlines())
    text = "\n".join(line for line in lines if line)
    return f"def {name}({arguments.removeprefix(', ')}):\n{text}\n"


def needed_for(result: Node) -> set[Node]:
    """A node of a graph, and all that it is computed from."""
    needed, waiting = set(), [result]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


@lru_cache(maxsize=1024)
def functions(text: str) -> Mapping[str, Callable[..., Any]]:
    """The functions of a text, by name."""
    found: dict[str, Any] = dict(_NAMES)
    exec(compile(text, "<mask>", "exec"), found)
    return {
        key: value
        for key, value in found.items()
        if inspect.isfunction(value) and key not in _NAMES
    }


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def column(
    function: Callable[..., Any],
    captures: Mapping[str, Any],
    sizes: Mapping[str, int],
    device: torch.device,
    titles: Sequence[str] = (),
) -> Tensor:
    """A function's values for all of the b, h, q and kv that it takes: `[sizes[name] for name in them]`.
    `titles` are the user's names of t0, t1, ..."""
    names = [name for name in parameters(function) if name in INDICES]
    shape = [sizes[name] for name in names]
    grid = [torch.arange(size, device=device) for size in shape]
    if len(grid) > 1:
        grid = [x.flatten() for x in torch.meshgrid(*grid, indexing="ij")]
    values = at_points(function, dict(zip(names, grid, strict=True)), captures, titles)
    return values.reshape(shape) if names else values


def at_points(
    function: Callable[..., Any],
    points: Mapping[str, Tensor],
    captures: Mapping[str, Any],
    titles: Sequence[str] = (),
) -> Tensor:
    """A function's values at points, each given by as many entries of the tensors `points [n]`;
    as it is where it takes none. `titles` are the user's names of t0, t1, ..."""
    names = parameters(function)
    moving = [name for name in names if name in INDICES]

    def of_point(*index: Tensor) -> Tensor:
        values = {**captures, **dict(zip(moving, index, strict=True))}
        return function(*(values[name] for name in names))

    def compute(of_point: Callable[..., Any]) -> Any:
        with torch.no_grad(), _ScalarIndexing(), _compat.vmap_in_ops():
            if not moving:
                return of_point()
            return torch.vmap(of_point)(*(points[name] for name in moving))

    def guarded() -> Any:
        noting, known = guards.guarded(of_point, names_by_id(captures, titles))
        given, found = compute(noting)
        if not _compat.is_fake(given):  # which has no values that could break a check
            require(guards.checks(known, found))
        return given

    where = [*(points[name] for name in moving), *captures.values()]
    if any(isinstance(x, Tensor) and guards.is_needed(x.device) for x in where):
        given = guarded()
    else:
        try:
            given = compute(of_point)
        except IndexError:  # of PyTorch's, which names no tensor
            given = guarded()
    return given if isinstance(given, Tensor) else torch.tensor(given, device="cpu")


def names_by_id(captures: Mapping[str, Any], titles: Sequence[str] = ()) -> dict[int, str]:
    """The names of captured tensors by their ids; `titles` are the user's names of t0, t1, ..."""
    numbered = {f"t{i}": title for i, title in enumerate(titles)}
    return {
        id(x): numbered.get(name, name) for name, x in captures.items() if isinstance(x, Tensor)
    }


def mask_mod_of(
    function: Callable[..., Any], captures: Mapping[str, Any], titles: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function `mask` of a text as a mask_mod: of b, h, q and kv alone.
    Its `names` say what the user calls its tensors."""
    names = parameters(function)

    def mask_mod(*index: Any) -> Any:
        values = {**captures, **dict(zip(INDICES, index, strict=True))}
        return function(*(values[name] for name in names))

    mask_mod.names = names_by_id(captures, titles)  # type: ignore[attr-defined]
    return mask_mod


def in_ops() -> contextlib.AbstractContextManager[Any]:
    """A context for calling a function of a text as a mask_mod: inside the implementation of an op."""
    stack = contextlib.ExitStack()
    stack.enter_context(_ScalarIndexing())
    stack.enter_context(_compat.vmap_in_ops())
    return stack


class Shown(NamedTuple):
    """The results of a mask_mod on grids of queries and keys, `[n, rows, keys]`, and the invalid points among them."""

    values: Any
    broken: list[guards.Broken]


def on_grids(
    mask_mod: Callable[..., Any],
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
    names: Mapping[int, str] | None = None,
) -> Shown:
    """Evaluates a mask_mod on grids of queries and keys: of the batch entry `b` and the head `h` of each, `[n]`, its
    queries `q [n, rows]` and its keys `kv [n, keys]`. `names` are those of captured tensors, by their ids; None stands
    for what the mask_mod calls them."""
    of_point = _of_truth_values(mask_mod)

    def compute(of_point: Callable[..., Any]) -> Any:
        of_row = torch.vmap(of_point, in_dims=(None, None, None, 0))
        of_grid = torch.vmap(of_row, in_dims=(None, None, 0, None))
        with torch.no_grad():
            return torch.vmap(of_grid)(*(x.clone() for x in (b, h, q, kv)))  # a mask_mod may write

    if not guards.is_needed(b.device):
        try:
            return Shown(compute(of_point), [])
        except (IndexError, RuntimeError) as error:  # of PyTorch's, which names no tensor
            if not guards.is_of_data(error):
                raise
    if names is None:
        names = Reached(mask_mod, "mask_mod").names
    noting, known = guards.guarded(of_point, names)
    shown, found = compute(noting)
    return Shown(shown, guards.paired(known, found))


def may_be_truth(shown: Tensor) -> bool:
    """True of bools, and of integers, which show where they are not 0. By that rule a mask of floats that is added to
    scores, 0 and -inf, would show what it hides."""
    return not (shown.is_floating_point() or shown.is_complex())


def _of_truth_values(mask_mod: Callable[..., Any]) -> Callable[..., Any]:
    """`mask_mod`, whose result for a query and a key must be one value."""

    def of_point(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        shown = mask_mod(b, h, q, kv)
        if isinstance(shown, bool):
            return torch.full_like(kv, shown, dtype=torch.bool)
        if not isinstance(shown, Tensor):
            found = "None" if shown is None else f"a {type(shown).__name__}"
            raise TypeError(f"`mask_mod` must return a bool tensor, got {found}")
        if not may_be_truth(shown):
            raise TypeError(
                f"`mask_mod` must return a bool tensor, got one of {shown.dtype}; return the condition itself"
            )
        if shown.dim():
            raise ValueError(
                f"`mask_mod` must return one value for a query and a key, got a tensor of shape {list(shown.shape)}"
            )
        return shown

    return of_point


def run(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Computes a node of its arguments, real tensors or some without values; with indices as in `at_points`."""
    if any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
        args, kwargs = _on_meta(list(args)), _on_meta(dict(kwargs))
        if node.target in ("cpu", "cuda"):
            return args[0]
    with torch.no_grad(), _ScalarIndexing():
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)  # type: ignore[arg-type]
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _on_meta(value: Any) -> Any:
    """Devices as that of tensors without values."""
    if isinstance(value, list):
        return [_on_meta(item) for item in value]
    if isinstance(value, dict):
        return {key: _on_meta(item) for key, item in value.items()}
    is_name = isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda")
    return "meta" if is_name or isinstance(value, torch.device) else value


def title_of(node: Node, names: Mapping[int, str]) -> str:
    """The description of a node for messages; `names` are the user's names of the captured tensors."""

    def show(x: Any) -> str:
        if isinstance(x, Node):
            return title_of(x, names)
        if isinstance(x, slice) and x.step is None:
            return ":".join("" if end is None else show(end) for end in (x.start, x.stop))
        if x is Ellipsis:
            return "..."
        return ", ".join(map(show, x)) if isinstance(x, (tuple, list)) else str(x)

    if node.op == "placeholder":
        is_table = node.name[0] == "t" and node.name[1:].isdecimal()
        return names.get(int(node.name[1:]), node.name) if is_table else node.name
    if node.target is sortable:  # of what is converted
        return title_of(node.all_input_nodes[0].all_input_nodes[0], names)
    name, arguments = name_of(node.target), [show(arg) for arg in node.args]
    if name in ("getitem", "index"):
        return f"{arguments[0]}[{arguments[1]}]"
    if name == "getattr":
        return f"{arguments[0]}.{arguments[1]}"
    sign = SIGNS.get(name.removeprefix("bitwise_"))
    if sign is not None and len(arguments) == 2:
        return f"({arguments[0]} {sign} {arguments[1]})"
    if node.op == "call_method":
        return f"{arguments[0]}.{name}({', '.join(arguments[1:])})"
    return f"{name}({', '.join(arguments)})"


class _ScalarIndexing(TorchFunctionMode):
    """`tensor[index]` with tensors of no dimensions looks values up, and does not ask for the index on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence = (), kwargs: Any = None):
        if func is torch.Tensor.__getitem__:
            indices = _as_tensors(*args)
            if indices is not None:
                return torch.ops.aten.index.Tensor(args[0], indices)
        kwargs = kwargs or {}
        name = name_of(func)
        if func is torch.isin and not kwargs and _is_few(*args):
            return (args[0] == args[1].flatten()).any()
        if name in ("sub", "rsub", "subtract") and len(args) == 2:
            args = _without_bools(*args)
        return func(*args, **kwargs)


def _without_bools(*args: Any) -> tuple[Any, ...]:
    """The operands of a difference, a bool beside a number as a number:
    what torch.vmap makes of them for a mask_mod."""
    dtypes = [x.dtype for x in args if isinstance(x, Tensor)]
    if len(dtypes) != 2 or dtypes.count(torch.bool) != 1:
        return args
    (dtype,) = (dtype for dtype in dtypes if dtype != torch.bool)
    return tuple(x.to(dtype) for x in args)


def _is_few(element: Any, values: Any) -> bool:
    """True if one element is sought among few values; torch.isin has no rule for torch.vmap."""
    are_tensors = isinstance(element, Tensor) and isinstance(values, Tensor)
    return are_tensors and element.dim() == 0 and values.numel() <= MAX_SOUGHT


def _as_tensors(tensor: Tensor, index: Any) -> list[Tensor | None] | None:
    """The operands of aten.index for an index of which some part is a tensor of no dimensions; None for any other."""
    items = index if isinstance(index, (tuple, list)) else [index]
    if not any(
        isinstance(item, Tensor) and item.dim() == 0 and item.dtype != torch.bool for item in items
    ):
        return None
    operands: list[Tensor | None] = []
    beside = next(item for item in items if isinstance(item, Tensor) and item.dim() == 0)
    if any(item is Ellipsis for item in items):
        place = next(i for i, item in enumerate(items) if item is Ellipsis)
        missing = [slice(None)] * (tensor.dim() - len(items) + 1)
        items = [*items[:place], *missing, *items[place + 1 :]]
    for item in items:
        if isinstance(item, Tensor):
            operands.append(item)
        elif isinstance(item, (int, torch.SymInt)) and not isinstance(item, bool):
            number: Any = item
            # Where torch.vmap goes over `beside`, it takes no index without values over which it does not.
            operands.append(
                torch.full_like(beside, number, dtype=torch.int64, device=tensor.device)
            )
        elif isinstance(item, slice) and item == slice(None):
            operands.append(None)
        else:
            return None
    return operands


def names_of_captures(tables: Iterable[Any], symbols: Iterable[Any]) -> dict[str, Any]:
    """Captured tensors and ints under the names that functions have for them."""
    return {
        **{f"t{i}": table for i, table in enumerate(tables)},
        **{f"s{i}": symbol for i, symbol in enumerate(symbols)},
    }
