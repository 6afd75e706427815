"""Fake tensors, and graphs that are traced with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` is a FakeTensor: it has a shape but no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_traced(tensor: Tensor) -> bool:
    """Whether what is done with `tensor` becomes a graph (of make_fx), so that nothing may depend on its values."""
    proxy = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]
    return is_fake(tensor) or torch._C._get_dispatch_mode(proxy) is not None


def fake_mode_of(tensor: Tensor) -> Any:
    """The FakeTensorMode that `tensor` belongs to, as a context manager."""
    return tensor.fake_mode  # type: ignore[attr-defined]


def differ(size: Any, other: Any) -> bool:
    """Whether two sizes differ. Of a graph that is traced that becomes a guard, but for sizes of which nothing is known yet: these count
    as equal, and whoever relies on it asks again when the graph runs."""
    if type(size) is int and type(other) is int:
        return size != other
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size != other)


def without_fake_tensors() -> Any:
    """A context in which new tensors are real, also where a graph is compiled."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def static_fake_mode() -> Any:
    """A FakeTensorMode without dynamic sizes, as a context manager."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def symbolic_fake_mode() -> Any:
    """A FakeTensorMode in which ints may stay unknown, as a context manager; nothing may ask for a tensor's values."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)


def symbolic_int(mode: Any, name: str) -> Any:
    """An unknown int of a `symbolic_fake_mode`; it is thought to be 8 where that matters."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = mode.shape_env.create_unspecified_symbol(8, source)
    return mode.shape_env.create_symintnode(symbol, hint=8, source=source)


def without_symbols(value: Any, mode: Any) -> Any:
    """A tensor or int of a graph that is being compiled as one that `mode` knows, of the sizes that are at hand."""
    if isinstance(value, torch.SymInt):
        return 8 if value.node.hint is None else int(value.node.hint)
    if not isinstance(value, Tensor):
        return value
    sizes, strides = ([without_symbols(x, mode) for x in f()] for f in (value.size, value.stride))
    with mode:
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def traced_to_aten(
    function: Callable[..., Any], arguments: Sequence[Any], mode: Any, *, decompose: bool = False
) -> torch.fx.GraphModule:
    """The operations of ATen that `function` does with `arguments` of a `symbolic_fake_mode`, or those that they consist of; also
    where a graph is being compiled."""
    from torch._decomp import core_aten_decompositions
    from torch._guards import tracing
    from torch.fx.experimental.proxy_tensor import make_fx

    table: Any = core_aten_decompositions() if decompose else None
    with tracing(None), torch.inference_mode(False), torch.no_grad(), mode:
        return make_fx(function, decomposition_table=table)(*arguments)


def graph_of(
    function: Any,
    tensors: Sequence[Tensor],
    num_ints: int,
    indices: tuple[int, torch.device],
    *,
    functional: bool = False,
) -> torch.fx.GraphModule:
    """The graph of PyTorch's operators that a function calls, for any values: of `indices[0]` int64 tensors without dimensions on
    the device `indices[1]`, of tensors like `tensors`, and of `num_ints` ints. Where it is `functional`, operators that write only
    do so at its end, to what the function was given."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with without_fake_tensors():
        environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        with mode:
            points = [
                torch.empty((), dtype=torch.int64, device=indices[1]) for _ in range(indices[0])
            ]
            like = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                for x in tensors
            ]
            ints = [environment.create_unbacked_symint() for _ in range(num_ints)]
        environment.pending_fresh_unbacked_symbols.clear()
        if functional:
            function = torch.func.functionalize(function, remove="mutations")
        return make_fx(function, tracing_mode="fake")(*points, *like, *ints)
