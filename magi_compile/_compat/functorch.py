"""torch.func: vmap, forward-mode derivatives, and the backward of compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


@contextmanager
def vmap_in_ops() -> Iterator[None]:
    """torch.vmap as in a program, also inside the implementation of an op, where the dispatcher may have put it aside.
    It raises where an operation has no rule for it, instead of a loop over all elements."""
    from torch._C import DispatchKey, _ForceDispatchKeyGuard

    functorch: Any = torch._C._functorch
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for name in _KEYS_OF_VMAP:
        exclude = exclude.remove(getattr(DispatchKey, name))
    has_fallback = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        with _ForceDispatchKeyGuard(include, exclude):
            yield
    finally:
        functorch._set_vmap_fallback_enabled(has_fallback)


_KEYS_OF_VMAP = (
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"),
    *("FuncTorchBatched", "FuncTorchVmapMode", "FuncTorchBatchedDecomposition"),
)


def allow_repeated_backward() -> None:
    """Lets `torch.autograd.grad(..., retain_graph=True)` run more than once through compiled graphs."""
    import torch._functorch.config as config

    config.donated_buffer = False


def has_tangents(tensors: Sequence[Tensor]) -> bool:
    """True if forward-mode differentiation follows one of them."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_transformed(tensors: Sequence[Tensor]) -> bool:
    """True if a transform of torch.func maps over one of them (vmap), or differentiates by it (grad, vjp, jacrev)."""
    functorch: Any = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return False
    for tensor in tensors:
        while functorch.is_functorch_wrapped_tensor(tensor):
            if tensor.requires_grad or not functorch.is_gradtrackingtensor(tensor):
                return True
            tensor = functorch.get_unwrapped(tensor)
    return False
