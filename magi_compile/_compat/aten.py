"""Tensors, and the operators of the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """The number of writes to `tensor`; 0 for tensors of `torch.inference_mode`, which do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def may_change_uncounted(tensor: Tensor) -> bool:
    """True if PyTorch itself writes to `tensor` without counting it: one of inference mode, or an output of Inductor's
    CUDA graphs, which is the same object in every replay."""
    return tensor.is_inference() or torch._C._is_cached_tensor(tensor)  # type: ignore[attr-defined]


def has_no_address(tensor: Tensor) -> bool:
    """True if `tensor` may be made of other tensors, as a DTensor and a sparse tensor are."""
    return type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided


def types_in_schema(schema: str) -> tuple[list[str], list[str]]:
    """The types of the arguments and of the results of an op's schema, as "Tensor" and "List[int]"."""
    parsed = torch._C.parse_schema(schema)
    arguments, results = ([str(x.type) for x in xs] for xs in (parsed.arguments, parsed.returns))
    return arguments, results


def types_of_ops() -> tuple[type, ...]:
    """The types of `torch.ops.namespace.name` and `torch.ops.namespace.name.overload`."""
    return torch._ops.OpOverloadPacket, torch._ops.OpOverload


def below_autograd(op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of `op` without autograd, in a kernel of an autograd key that was called with `keys`."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)


def has_torch_function_mode() -> bool:
    """True if a torch function mode wants to see what is called, also while Dynamo traces."""
    return torch._C._is_torch_function_mode_enabled()


def cpu_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention for CPUs: `(out, lse)` of `[batch, nheads, seqlen, head_dim]` tensors.

    All of one head_dim, whose stride is 1. `mask` is added to the scores: `[seqlen_q, seqlen_k]`, the dtype of `q`.
    A row that sees nothing gets a wrong lse. `is_causal` lets row r see the keys up to r.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=softmax_scale
    )


def cpu_flash_backward(
    dout: Tensor,
    saved: Sequence[Tensor],
    mask: Tensor | None,
    is_causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `cpu_flash_forward`, of which `q, k, v, out, lse` are `saved`. It takes `out` and `lse` as they
    come: those of a row over more keys than these give the share of these keys. It reads `out` only for the row sums of
    `dout * out`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, *saved, 0.0, is_causal, attn_mask=mask, scale=softmax_scale
    )
