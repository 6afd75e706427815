"""Fake tensors, and graphs that are traced with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_fake(tensor: Tensor) -> bool:
    """True if `tensor` is a FakeTensor: it has a shape but no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_traced(tensor: Tensor) -> bool:
    """True if make_fx traces operations on `tensor`, so that nothing may depend on its values."""
    proxy = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]
    return is_fake(tensor) or torch._C._get_dispatch_mode(proxy) is not None


def fake_mode_of(tensor: Tensor) -> Any:
    """The FakeTensorMode that `tensor` belongs to, as a context manager."""
    return tensor.fake_mode  # type: ignore[attr-defined]


def share_memory(x: Tensor, y: Tensor) -> bool:
    """True if two tensors, real or fake, also inside of vmap, are views of one memory."""
    x, y = _without_vmap(x), _without_vmap(y)
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _without_vmap(x: Tensor) -> Tensor:
    while torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def is_of_higher_order(target: Any) -> bool:
    """True if the target of a node is an operator that takes functions, as those of graphs are."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def differ(size: Any, other: Any) -> bool:
    """True if two sizes differ. While a graph is traced, that becomes a guard, but for sizes of which nothing is known
    yet: these count as equal, and whoever relies on it asks again when the graph runs."""
    if type(size) is int and type(other) is int:
        return size != other
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size != other)


def differ_now(size: Any, other: Any) -> bool:
    """`differ` without a guard where no graph of Dynamo's is traced: for what an op is given, which asks again in each
    run. There PyTorch may have sizes of the tensor that a given one is a view of, which no guard can be on."""
    if torch.compiler.is_dynamo_compiling():
        return differ(size, other)
    unequal: Any = size != other
    if isinstance(unequal, torch.SymBool):
        return bool(unequal.node.has_hint() and unequal.node.hint)
    return bool(unequal)


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


def size_at_hand(size: Any) -> Any:
    """The number that a symbolic size has in the call which is traced;
    a size of which no number is known stays a symbol."""
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    return size if hint is None else hint


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
    """The operations of ATen that `function` does with `arguments` of a `symbolic_fake_mode`, or those that they
    consist of; also where a graph is being compiled."""
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
    """The graph of PyTorch's operators that `function` calls, for any values.

    It is given int64 tensors without dimensions, as many as `indices` says and on its device, then tensors like
    `tensors`, with any symbolic sizes, then `num_ints` ints. Where `functional`, operators that write only do so at
    the end, to what the function was given. Raises ValueError where the function does not do the same for all sizes.
    """
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with tracing(None), without_fake_tensors():
        environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        with mode:
            points = [
                torch.empty((), dtype=torch.int64, device=indices[1]) for _ in range(indices[0])
            ]
            sizes: dict[Any, Any] = {}
            like = [_of_other_sizes(x, sizes, environment) for x in tensors]
            ints = [environment.create_unbacked_symint() for _ in range(num_ints)]
        environment.pending_fresh_unbacked_symbols.clear()
        if functional:
            function = torch.func.functionalize(function, remove="mutations")
        graph = make_fx(function, tracing_mode="fake")(*points, *like, *ints)
        if environment.guards:
            raise ValueError("the function does not do the same for all sizes")
        return graph


def _of_other_sizes(x: Tensor, sizes: dict[Any, Any], environment: Any) -> Tensor:
    """A tensor like `x`, in place of whose symbolic sizes are those of `sizes`, which are new in `environment`."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    if all(isinstance(size, int) for size in x.shape):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    shape: list[Any] = []
    for size in x.shape:
        key = size if isinstance(size, int) else size.node.expr
        if key is not size and key not in sizes:
            hint, source = without_symbols(size, None), ConstantSource(f"n{len(sizes)}")
            symbol = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            sizes[key] = environment.create_symintnode(symbol, hint=hint, source=source)
        shape.append(sizes.get(key, key))
    return torch.empty(shape, dtype=x.dtype, device=x.device)
