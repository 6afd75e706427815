"""A function of indices as a graph, by calling it once with symbols: what Dynamo does in torch.compile,
for eager code."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from magi_compile.functions.names import is_numpy_scalar, is_random, name_of, writes
from magi_compile.functions.reached import Reached
from magi_compile.functions.text import run, title_of


class UnreadableError(NotImplementedError):
    """A function cannot be recorded; the message says why."""


class Recording(NamedTuple):
    """The record of a call of a mask_mod or a score_mod.

    Attributes:
        graph: its placeholders are its arguments, then the captured tensors.
        captures: the captured tensors.
        names: what the user calls them; None for those without a name.
        watched: every tensor that it looked at, whose change may change the mask.
        values: the tensors that it captured or computed of those alone, by their nodes.
        has_read: whether it may follow from what is in the captured tensors, and not from their kinds alone.
    """

    graph: torch.fx.Graph
    captures: list[Tensor]
    names: list[str | None]
    watched: list[Tensor]
    values: dict[torch.fx.Node, Tensor]
    has_read: bool


def record(
    function: Callable[..., Any], arguments: Mapping[str, Tensor], device: torch.device, what: str
) -> Recording:
    """Calls `function` once, with symbols that stand for tensors on `device`: the graph of the call.

    `arguments` are its arguments by name, tensors without values, and `what` is the user's word for the function,
    "mask_mod". Raises UnreadableError where it asks for the value of what it is called with, TypeError where it
    takes other arguments, and ValueError where it reads a DTensor.
    """
    recorder = _Recorder(device, what, function)
    symbols = [recorder.argument(name, example) for name, example in arguments.items()]
    check_takes(function, arguments, what)
    with recorder:
        result = function(*symbols)
    recorder.graph.output(recorder.lower(result))
    names = Reached(function, what).names
    named = [names.get(id(tensor)) for tensor in recorder.captures]
    values = {recorder.nodes[id(x)]: x for x in recorder.kept if id(x) in recorder.nodes}
    return Recording(
        *(recorder.graph, recorder.captures, named, recorder.watched, values, recorder.has_read)
    )


def check_takes(function: Callable[..., Any], names: Iterable[str], what: str) -> None:
    """Raises TypeError if `function`, which errors call `what`, cannot be called with arguments of these `names`."""
    *first, last = names
    try:
        inspect.signature(function).bind(*first, last)
    except TypeError as error:
        raise TypeError(
            f"`{what}` must be a function of {', '.join(first)} and {last}: {error}"
        ) from None
    except ValueError:  # of a builtin, which has no signature
        pass


def _refuse_dtensor(x: Tensor, function: Callable[..., Any], what: str) -> None:
    """Raises ValueError for a DTensor, of which the indices of a score would look up this rank's part."""
    dtensors = sys.modules.get("torch.distributed.tensor")
    if dtensors is None or not isinstance(x, dtensors.DTensor):
        return
    name = Reached(function, what).names.get(id(x), "x")
    instead = f"capture the whole tensor, {name}.full_tensor()"
    if what == "score_mod":
        instead = (
            f"capture the whole tensor, {name}.full_tensor(grad_placements=[...]), with Partial() for each dimension "
            "of its mesh that shards q, so that gradients add up, and Replicate() for others"
        )
    # No TypeError, which PyTorch makes another one of, of operands, inside of an operator's method.
    raise ValueError(f"`{what}` must capture no DTensor, got `{name}`; {instead}")


class _Symbol:
    """Stands for a tensor inside a mask_mod: a node of the graph, and what its shape and dtype are."""

    def __init__(self, node: torch.fx.Node, example: Tensor, recorder: _Recorder):
        self.node = node
        self.example = example
        self.recorder = recorder

    shape = property(lambda self: self.example.shape)
    dtype = property(lambda self: self.example.dtype)
    ndim = property(lambda self: self.example.ndim)
    device = property(lambda self: self.recorder.device)

    def dim(self) -> int:
        return self.example.dim()

    def size(self, *args: Any) -> Any:
        return self.example.size(*args)

    def numel(self) -> int:
        return self.example.numel()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence = (), kwargs: Any = None):
        symbols = [item for item in _flatten([args, kwargs or {}]) if isinstance(item, _Symbol)]
        return symbols[0].recorder.call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not callable(getattr(Tensor, name)):  # .T, say
            return self.recorder.call(getattr, (self, name), {})
        return lambda *args, **kwargs: self.recorder.call_method(name, (self, *args), kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.recorder.call(operator.setitem, (self, index, value), {})

    __hash__ = None  # type: ignore[assignment]


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: self.recorder.call_method(name, (self, *args), {})


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: self.recorder.call(function, (self, other), {})


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "rshift", "lshift")
_BITWISE = ("and", "or", "xor")

# Python's operators by the names of their methods, and whether these exchange the operands.
_OPERATORS: dict[str, tuple[Callable[..., Any], bool]] = {
    **{
        f"__{name}__": (getattr(operator, name), False)
        for name in (*_COMPARISONS, "neg", "pos", "invert", "getitem")
    },
    **{
        f"__{prefix}{name}__": (getattr(operator, f"__{name}__"), bool(prefix))
        for name in (*_ARITHMETIC, *_BITWISE, "matmul")
        for prefix in ("", "r")
    },
}
_OPERATOR_OF = {getattr(Tensor, name): found for name, found in _OPERATORS.items()}
for _name in (*_ARITHMETIC, *_BITWISE):
    setattr(_Symbol, f"__i{_name}__", _in_place(getattr(operator, f"__i{_name}__")))
for _name in (*_OPERATORS, "__abs__"):
    setattr(_Symbol, _name, _operator(_name))


def _needs_value(name: str) -> Callable[..., Any]:
    def needs_value(self: _Symbol, *args: Any, **kwargs: Any) -> Any:
        raise UnreadableError(
            f"`{name}` of `{title_of(self.node, {})}` needs its value: a {self.recorder.what} cannot "
            f"branch on its arguments, use & | ~ and torch.where"
        )

    return needs_value


for _name in ("bool", "int", "index", "float", "len", "iter", "contains"):
    setattr(_Symbol, f"__{_name}__", _needs_value(_name))
for _name in ("item", "tolist"):
    setattr(_Symbol, _name, _needs_value(_name))


class _Recorder(TorchFunctionMode):
    """Writes down the operations of a function. What is computed from captured tensors alone is computed as well."""

    def __init__(self, device: torch.device, what: str, function: Callable[..., Any]) -> None:
        super().__init__()
        self.device = device
        self.what = what
        self.function = function
        self.graph = torch.fx.Graph()
        self.captures: list[Tensor] = []
        self.watched: list[Tensor] = []
        self.nodes: dict[int, torch.fx.Node] = {}  # of tensors, by `id`
        self.examples: dict[int, Tensor] = {}
        self.kept: list[Tensor] = []  # so that no `id` comes back
        self.is_running = False
        self.has_read = False

    def argument(self, name: str, example: Tensor) -> _Symbol:
        return _Symbol(self.graph.placeholder(name), example, self)

    def __torch_function__(self, func: Any, types: Any, args: Sequence = (), kwargs: Any = None):
        kwargs = kwargs or {}
        items = list(_flatten([args, kwargs]))
        if self.is_running:
            return func(*args, **kwargs)
        if is_random(name := name_of(func)):
            raise UnreadableError(f"`{name}` is random")
        if any(isinstance(item, _Symbol) for item in items):
            return self.call(func, args, kwargs)
        if writes(func, kwargs, args):
            raise UnreadableError(f"`{name}` writes to a tensor that is not made of b, h, q or kv")
        result = func(*args, **kwargs)
        tensors = [item for item in items if isinstance(item, Tensor)]
        self.has_read |= bool(tensors) and not _asks_for_kind(func)
        if tensors and getattr(func, "__name__", "") not in ("__get__", "size", "dim", "numel"):
            self.watched += [tensor for tensor in tensors if id(tensor) not in self.nodes]
        if tensors and isinstance(result, Tensor) and not any(result is item for item in tensors):
            self.keep(result, self.node(func, args, kwargs))
        return result

    def keep(self, tensor: Tensor, node: torch.fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.kept.append(tensor)

    def call_method(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.call(getattr(Tensor, name), args, kwargs)

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A symbol for the result, or a tuple of symbols."""
        node = self.node(func, args, kwargs)
        self.is_running = True
        try:
            example = _example_of(func, node, *(self.example(value) for value in (args, kwargs)))
        except Exception as error:
            # What the mask_mod goes on to do with it cannot be known.
            reason = f"`{title_of(node, {})}` cannot be followed: {error}"
            raise UnreadableError(reason.splitlines()[0]) from error
        finally:
            self.is_running = False
        if isinstance(example, (tuple, list)):
            items = [
                self.graph.call_function(operator.getitem, (node, i)) for i in range(len(example))
            ]
            return tuple(map(self.symbol, items, example))
        return self.symbol(node, example)

    def symbol(self, node: torch.fx.Node, example: Any) -> Any:
        return _Symbol(node, example, self) if isinstance(example, Tensor) else example

    def node(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.fx.Node:
        """The call as a node, spelled as FX prints it."""
        args, kwargs = self.lower(args), self.lower(kwargs)
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if name == "__get__" and owner is not None:  # an attribute such as Tensor.T
            return self.graph.call_function(getattr, (args[0], owner.__name__))
        if func in _OPERATOR_OF:
            plain, is_reflected = _OPERATOR_OF[func]
            return self.graph.call_function(plain, tuple(args[::-1] if is_reflected else args))
        if name and getattr(Tensor, name, None) is func:
            return self.graph.call_method(name, tuple(args), kwargs)
        return self.graph.call_function(func, tuple(args), kwargs)

    def lower(self, value: Any) -> Any:
        """Symbols and tensors as nodes, inside any nesting."""
        if isinstance(value, _Symbol):
            return value.node
        if isinstance(value, Tensor):
            return self.node_of(value)
        return value.item() if is_numpy_scalar(value) else _mapped(self.lower, value)

    def example(self, value: Any) -> Any:
        """Symbols and tensors as tensors without values, inside any nesting."""
        if isinstance(value, _Symbol):
            return value.example
        if isinstance(value, Tensor):
            if id(value) not in self.examples:
                self.examples[id(value)] = torch.empty_like(value, device="meta")
                self.kept.append(value)
            return self.examples[id(value)]
        return value.item() if is_numpy_scalar(value) else _mapped(self.example, value)

    def node_of(self, tensor: Tensor) -> torch.fx.Node:
        if id(tensor) not in self.nodes:
            if type(tensor) is not Tensor:
                _refuse_dtensor(tensor, self.function, self.what)
            last = next(n for n in reversed(self.graph.nodes) if n.op == "placeholder")
            with self.graph.inserting_after(last):
                self.keep(tensor, self.graph.placeholder(f"t{len(self.captures)}"))
            self.captures.append(tensor)
            self.watched.append(tensor)
        return self.nodes[id(tensor)]


_KINDS = ("shape", "dtype", "device", "ndim", "layout", "requires_grad")


def _asks_for_kind(func: Any) -> bool:
    """True if a function of tensors asks for nothing that is in them."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _KINDS
    return name in ("size", "dim", "numel", "stride", "__len__")


# Results of Python's operators without values, by what they follow from: PyTorch takes long to find them.
_examples: dict[Hashable, Tensor] = {}
MAX_EXAMPLES = 1024


def _example_of(func: Any, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]):
    """The result of a call without values, of its arguments without values."""
    if func not in _OPERATOR_OF or kwargs:
        return run(node, args, kwargs)
    key = func, *map(_kind_of, args), torch.get_default_dtype()
    if None in key:
        return run(node, args, kwargs)
    if key not in _examples:
        found = run(node, args, kwargs)
        if not isinstance(found, Tensor):
            return found
        if len(_examples) >= MAX_EXAMPLES:
            _examples.clear()
        _examples[key] = found
    return _examples[key].detach()  # the function may change its shape in place


def _kind_of(x: Any) -> Hashable:
    """All of a tensor or number that the kind of a result follows from; None for anything else."""
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride()
    return (type(x), x) if type(x) in (bool, int, float) else None


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)(map(function, value)) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*map(function, (value.start, value.stop, value.step)))
    return value


def _flatten(value: Any):
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flatten(item)
    elif isinstance(value, dict):
        yield from _flatten(list(value.values()))
    else:
        yield value
