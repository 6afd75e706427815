"""From a mask_mod to a MaskProgram: by calling it with symbols, or from the graph that Dynamo made of it.

Both ways build expressions through the one table of operations.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from magi_compile.masks.expr import Expr, ExprError, symbol, table, unsupported, var
from magi_compile.masks.operations import as_expr, call, name_of
from magi_compile.masks.program import MaskProgram
from magi_compile.masks.solve import UnsupportedMaskError

MaskMod = Callable[[Any, Any, Any, Any], Any]


def trace_mask_mod(mask_mod: MaskMod) -> tuple[MaskProgram, list[Tensor]]:
    """Calls `mask_mod(b, h, q, kv)` once, with symbols.

    Returns:
        The program, and the captured tensors it looks up.

    Raises:
        UnsupportedMaskError: with all reasons why the mask has no program, or no key intervals.
    """
    tracer = _Tracer()
    with tracer:
        result = mask_mod(*(_Symbol(var(name), tracer) for name in ("b", "h", "q", "kv")))
    expr = tracer.expr_of(result)
    names = _tensor_names(mask_mod)
    named = [names.get(id(tensor), f"t{i}") for i, tensor in enumerate(tracer.tables)]
    has_names = any(id(tensor) in names for tensor in tracer.tables)
    program = MaskProgram(expr, tuple(named) if has_names else ())
    _refuse(program, tracer.tables)
    return program, tracer.tables


def trace_graph(
    graph: torch.fx.GraphModule,
    capture_kinds: Sequence[str],
    names: Sequence[str] = (),
    tables: Sequence[Tensor] | None = None,
) -> MaskProgram:
    """Reads the graph that Dynamo made of a mask_mod.

    Args:
        graph: its placeholders are b, h, q, kv, then the captured values.
        capture_kinds: for each captured value "table" (a tensor) or "symbol" (an int); tables and symbols are
            numbered separately.
        names: what the user calls the tables.
        tables: the tables, real or fake, whose shapes and dtypes are looked at; None leaves that to the caller.

    Raises:
        UnsupportedMaskError: with all reasons why the mask has no program, or no key intervals.
    """
    values: dict[torch.fx.Node, Any] = {}
    captures = _captures(capture_kinds)
    arguments = [*map(var, ("b", "h", "q", "kv")), *captures]
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(arguments):
        raise ValueError(
            f"`capture_kinds` must have {len(placeholders) - 4} entries, one for each captured value, "
            f"got {len(capture_kinds)}"
        )
    values.update(zip(placeholders, arguments, strict=True))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            result = args[0]
        elif node.op in ("call_function", "call_method"):
            values[node] = call(name_of(node.target), args, kwargs)
            if _is_aliased(node):
                values[node] = unsupported(f"`{node.target}` changes a value that is used again")
        else:
            values[node] = unsupported(f"`{node.op} {node.target}` in the graph of the mask_mod")
    if isinstance(result, (tuple, list)):
        (result,) = result
    program = MaskProgram(as_expr(result), tuple(names))
    _refuse(program, tables)
    return program


def _refuse(program: MaskProgram, tables: Sequence[Tensor] | None) -> None:
    """Raises UnsupportedMaskError with every reason against `program`, and against `tables` if they are known."""
    reasons = []
    try:
        _ = program.solved
    except UnsupportedMaskError as error:
        reasons += error.reasons
    if tables is not None:
        reasons += program.table_reasons(tables)
    if reasons:
        raise UnsupportedMaskError(reasons)


def _captures(kinds: Sequence[str]) -> list[Expr]:
    makers = {"table": table, "symbol": symbol}
    counts = dict.fromkeys(makers, 0)
    captures = []
    for kind in kinds:
        if kind not in makers:
            raise ValueError(f"`capture_kinds` must hold 'table' or 'symbol', got {kind!r}")
        captures.append(makers[kind](counts[kind]))
        counts[kind] += 1
    return captures


def _is_aliased(node: torch.fx.Node) -> bool:
    """Whether an in-place operation changes a value that something else reads too."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    is_in_place = is_in_place and name not in ("and_", "or_", "not_")
    return is_in_place and any(len(arg.users) > 1 for arg in node.all_input_nodes[:1])


_IN_PLACE = ("iadd", "isub", "imul", "ifloordiv", "imod", "iand", "ior", "ixor")


# Calling a mask_mod with symbols


class _Symbol:
    """Stands for a 0-d tensor inside a mask_mod."""

    dtype = torch.int64
    device = torch.device("cpu")
    shape = torch.Size(())
    ndim = 0

    def __init__(self, expr: Expr, tracer: _Tracer):
        self.expr = expr
        self.tracer = tracer

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return self.shape

    def numel(self) -> int:
        return 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence = (), kwargs: Any = None):
        symbols = [item for item in _flatten([args, kwargs or {}]) if isinstance(item, _Symbol)]
        return symbols[0].tracer.call(name_of(func), args, kwargs or {})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.tracer.call(name_of(name), (self, *args), kwargs)

    __hash__ = None  # type: ignore[assignment]


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.tracer.call(name, (self, *args), {})


def _reflected(name: str) -> Callable[..., Any]:
    return lambda self, other: self.tracer.call(name, (other, self), {})


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "getitem"):
    setattr(_Symbol, f"__{_name}__", _operator(_name))
_BINARY = "add sub mul floordiv truediv mod and or xor rshift lshift pow matmul divmod"
for _name in _BINARY.split():
    setattr(_Symbol, f"__{_name}__", _operator(_name))
    setattr(_Symbol, f"__r{_name}__", _reflected(_name))


def _concrete(name: str) -> Callable[..., Any]:
    def needs_value(self: _Symbol, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedMaskError(
            [
                f"`{name}` of `{self.expr}` needs its value: a mask_mod can not branch on its arguments, "
                f"use & | ~ and torch.where"
            ]
        )

    return needs_value


for _name in ("bool", "int", "index", "float", "len", "iter", "contains"):
    setattr(_Symbol, f"__{_name}__", _concrete(_name))
for _name in ("item", "tolist"):
    setattr(_Symbol, _name, _concrete(_name))


class _Tracer(TorchFunctionMode):
    """Sees the operations of a mask_mod, also `captured_tensor[q]`, and numbers the captured tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if any(isinstance(item, _Symbol) for item in _flatten([args, kwargs])):
            return self.call(name_of(func), args, kwargs)
        return func(*args, **kwargs)

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Symbol:
        args, kwargs = self.lower(args), self.lower(kwargs)
        return _Symbol(call(name, args, kwargs), self)

    def lower(self, value: Any) -> Any:
        """Symbols and captured tensors as expressions, inside any nesting."""
        if isinstance(value, _Symbol):
            return value.expr
        if isinstance(value, Tensor):
            return self.table_of(value)
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
            return tuple(self.lower(item) for item in value)
        if isinstance(value, dict):
            return {key: self.lower(item) for key, item in value.items()}
        return value

    def table_of(self, tensor: Tensor) -> Expr:
        for index, known in enumerate(self.tables):
            if known is tensor:
                return table(index)
        self.tables.append(tensor)
        return table(len(self.tables) - 1)

    def expr_of(self, result: Any) -> Expr:
        try:
            return as_expr(self.lower(result))
        except ExprError as error:
            return unsupported(f"the mask_mod returns something else than a truth value: {error}")


def _flatten(value: Any):
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, dict):
        yield from _flatten(list(value.values()))
    else:
        yield value


def _tensor_names(mask_mod: Any) -> dict[int, str]:
    """The names of the tensors that a callable holds, by `id`: its variables, attributes and arguments."""
    names: dict[int, str] = {}
    seen: set[int] = set()

    def visit(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            names.setdefault(id(value), name)
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, functools.partial):
            visit(name, value.func)
            for i, item in enumerate(value.args):
                visit(f"{name}.args[{i}]", item)
            visit_all(value.keywords)
        elif isinstance(value, types.MethodType):
            visit("self", value.__self__)
            visit(name, value.__func__)
        elif isinstance(value, types.FunctionType):
            code = value.__code__
            cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
            visit_all({key: cell.cell_contents for key, cell in cells if _is_filled(cell)})
            visit_all({key: value.__globals__.get(key) for key in code.co_names})
            defaults = value.__defaults__ or ()
            arguments = code.co_varnames[: code.co_argcount]
            visit_all(dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)))
            visit_all(value.__kwdefaults__ or {})
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                visit(f"{name}[{i}]", item)
        elif isinstance(value, dict):
            visit_all(value)
        elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
            visit_all(vars(value))

    def visit_all(items: dict[Any, Any]) -> None:
        for key, item in items.items():
            if isinstance(item, (Tensor, tuple, list, dict)) or callable(item):
                visit(str(key), item)

    visit("mask_mod", mask_mod)
    return names


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
