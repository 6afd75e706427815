"""From a mask_mod to a MaskProgram: by calling it with symbols, or from the graph that Dynamo made of it.

Both ways build expressions through the one table of operations below. An operation that is not in it becomes an
`unsupported` node, so that the user hears of all of them at once.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from magi_compile.masks.expr import (
    ONE,
    ZERO,
    Expr,
    ExprError,
    build,
    const,
    int_value,
    symbol,
    table,
    unsupported,
    var,
)
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
    reasons = _table_reasons(program, tracer.tables)
    try:
        _ = program.keys
    except UnsupportedMaskError as error:
        reasons = error.reasons + reasons
    if reasons:
        raise UnsupportedMaskError(reasons)
    return program, tracer.tables


def trace_graph(
    graph: torch.fx.GraphModule, capture_kinds: Sequence[str], names: Sequence[str] = ()
) -> MaskProgram:
    """Reads the graph that Dynamo made of a mask_mod.

    Args:
        graph: its placeholders are b, h, q, kv, then the captured values.
        capture_kinds: for each captured value "table" (a tensor) or "symbol" (an int); tables and symbols are
            numbered separately.
        names: what the user calls the tables.

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
            values[node] = _call(_name_of(node.target), args, kwargs)
            if _is_aliased(node):
                values[node] = unsupported(f"`{node.target}` changes a value that is used again")
        else:
            values[node] = unsupported(f"`{node.op} {node.target}` in the graph of the mask_mod")
    if isinstance(result, (tuple, list)):
        (result,) = result
    program = MaskProgram(_as_expr(result), tuple(names))
    _ = program.keys
    return program


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


# The table of operations


def _integers(x: Expr) -> Expr:
    return build("where", x, ONE, ZERO) if x.kind == "bool" else x


def _bools(x: Expr) -> Expr:
    return build("ne", x, ZERO) if x.kind == "int" else x


def _convert(x: Expr, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Expr:
    dtype = next((arg for arg in args if isinstance(arg, torch.dtype)), dtype)
    if dtype is None:
        return x
    if dtype == torch.bool:
        return _bools(x)
    if dtype.is_floating_point or dtype.is_complex:
        raise ExprError(f"`{x}` is converted to {dtype}; masks are computed with integers")
    return _integers(x)


def _full(_: Any, size: Any = (), fill_value: Any = 0, *, dtype: Any = None, **__: Any) -> Expr:
    if not isinstance(size, (tuple, list)) or len(size):
        raise ExprError(f"a tensor of shape {size} is made inside the mask_mod")
    return _convert(_as_expr(fill_value), dtype)


def _like(value: int) -> Callable[..., Expr]:
    def full_like(x: Expr, fill_value: Any = value, *, dtype: Any = None, **_: Any) -> Expr:
        is_bool = dtype is None and x.kind == "bool"
        return _convert(_as_expr(fill_value), torch.bool if is_bool else dtype)

    return full_like


def _new(value: int) -> Callable[..., Expr]:
    return lambda x, size=(), **kwargs: _full(x, size, value, **kwargs)


def _clamp(x: Expr, min: Any = None, max: Any = None) -> Expr:
    if min is not None:
        x = build("max", x, _as_expr(min))
    return x if max is None else build("min", x, _as_expr(max))


def _divide(x: Expr, y: Expr, *, rounding_mode: str | None = None) -> Expr:
    if rounding_mode != "floor":
        raise ExprError(f"`{x} / {y}` does not round down; write `{x} // {y}`")
    return build("floordiv", x, y)


def _power_of_two(y: Expr) -> Expr:
    bits = int_value(y)
    if bits is None or not 0 <= bits < 63:
        raise ExprError(f"a shift by `{y}`")
    return const(2**bits)


def _get_item(x: Any, index: Any) -> Expr:
    indices = index if isinstance(index, (tuple, list)) else [index]
    if x.op != "table":
        raise ExprError(f"`{x}` is indexed; only captured tensors can be")
    for item in indices:
        if not isinstance(item, (Expr, int)) or isinstance(item, bool):
            kind = "`...`" if item is Ellipsis else f"`{item}`"
            raise ExprError(
                f"a captured tensor is indexed with {kind}; use one index for each dimension"
            )
    return table(*x.args, *map(_as_expr, indices))


def _same(x: Expr, **_: Any) -> Expr:
    return x


def _plain(op: str) -> Callable[..., Expr]:
    def apply(*args: Any, **kwargs: Any) -> Expr:
        if kwargs.pop("alpha", 1) != 1 or kwargs:
            raise ExprError(f"`{op}` with keyword arguments")
        return build(op, *args)

    return apply


def _logical(op: str) -> Callable[..., Expr]:
    return lambda *args: build(op, *map(_bools, args))


_OPERATIONS: dict[str, Callable[..., Expr]] = {
    **{
        name: _plain(op)
        for op, names in {
            "add": "add iadd",
            "sub": "sub subtract isub",
            "mul": "mul multiply imul",
            "floordiv": "floordiv floor_divide ifloordiv",
            "mod": "mod remainder imod",
            "neg": "neg negative",
            "abs": "abs absolute",
            "min": "minimum min",
            "max": "maximum max",
            "lt": "lt less",
            "le": "le less_equal",
            "gt": "gt greater",
            "ge": "ge greater_equal",
            "eq": "eq",
            "ne": "ne not_equal",
            "and": "and bitwise_and iand",
            "or": "or bitwise_or ior",
            "xor": "xor bitwise_xor ixor",
            "not": "invert bitwise_not inv",
            "where": "where",
        }.items()
        for name in names.split()
    },
    **{f"logical_{op}": _logical(op) for op in ("and", "or", "xor", "not")},
    "rsub": lambda x, y: build("sub", y, x),
    "pos": _same,
    "positive": _same,
    "clone": _same,
    "contiguous": _same,
    "detach": _same,
    "to": _convert,
    "type": _convert,
    "bool": _bools,
    "int": _integers,
    "long": _integers,
    "float": lambda x: _convert(x, torch.float32),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "div": _divide,
    "divide": _divide,
    "truediv": _divide,
    "rshift": lambda x, y: build("floordiv", x, _power_of_two(y)),
    "lshift": lambda x, y: build("mul", x, _power_of_two(y)),
    "getitem": _get_item,
    "index": _get_item,
    "new_ones": _new(1),
    "new_zeros": _new(0),
    "new_full": _full,
    "ones_like": _like(1),
    "zeros_like": _like(0),
    "full_like": _like(0),
}


def _name_of(target: Any) -> str:
    """One spelling for `operator.eq`, `Tensor.__eq__`, `torch.eq`, "eq" and `aten.eq.Scalar`."""
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.split(".")[0].strip("_")


def _call(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Expr:
    operation = _OPERATIONS.get(name)
    if operation is None:
        return unsupported(f"`{name}` is not an operation on masks")
    try:
        numbers = (bool, int, float)
        args = [_as_expr(arg) if isinstance(arg, numbers) else arg for arg in args]
        return operation(*args, **kwargs)
    except ExprError as error:
        return unsupported(str(error))
    except TypeError:
        return unsupported(f"`{name}` is called in a way that masks do not have")


def _as_expr(value: Any) -> Expr:
    if isinstance(value, Expr):
        return value
    if isinstance(value, (bool, int)):
        return const(value)
    if isinstance(value, float) and value.is_integer():
        return const(int(value))
    raise ExprError(f"`{value!r}` is not an integer, a truth value or a captured tensor")


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
        return symbols[0].tracer.call(_name_of(func), args, kwargs or {})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.tracer.call(_name_of(name), (self, *args), kwargs)

    __hash__ = None  # type: ignore[assignment]


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.tracer.call(name, (self, *args), {})


def _reflected(name: str) -> Callable[..., Any]:
    return lambda self, other: self.tracer.call(name, (other, self), {})


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "getitem"):
    setattr(_Symbol, f"__{_name}__", _operator(_name))
_BINARY = "add sub mul floordiv truediv mod and or xor rshift lshift"
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
            return self.call(_name_of(func), args, kwargs)
        return func(*args, **kwargs)

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Symbol:
        args, kwargs = self.lower(args), self.lower(kwargs)
        return _Symbol(_call(name, args, kwargs), self)

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
            return _as_expr(self.lower(result))
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


def _table_reasons(program: MaskProgram, tables: Sequence[Tensor]) -> list[str]:
    reasons = []
    for node in program.expr.walk():
        if node.op != "table":
            continue
        tensor, text = tables[node.args[0]], program.describe(node)
        if tensor.dim() != len(node.args) - 1:
            reasons.append(
                f"`{text}` uses {len(node.args) - 1} indices for a tensor of shape {list(tensor.shape)}"
            )
        if tensor.is_floating_point() or tensor.is_complex():
            reasons.append(f"`{text}` is {tensor.dtype}; masks are computed with integers")
    return reasons


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
