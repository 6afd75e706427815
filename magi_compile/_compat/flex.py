"""FlexAttention: its operator, how it calls a mask_mod, and where it asks us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from magi_compile._compat.dynamo import backend_that_dynamo_traces_for

#: The block size of a BlockMask that stands for "no block list".
LARGE_SPARSE_BLOCK_SIZE = 1 << 30


def flex_operator() -> Any:
    """The operator that `flex_attention` calls: of q, k, v, score_mod, the BlockMask as a tuple,
    scale and kernel options."""
    return torch.ops.higher_order.flex_attention


def flex_identity() -> Any:
    """The score_mod of a call that has none."""
    from torch.nn.attention import flex_attention as flex

    return flex._identity


def give_block_masks_ndim() -> None:
    """Lets code that asks a BlockMask for the number of its dimensions, as it asks a tensor, have its answer."""
    from torch.nn.attention.flex_attention import BlockMask

    if not hasattr(BlockMask, "ndim"):
        BlockMask.ndim = property(lambda block_mask: len(block_mask.shape))  # type: ignore[attr-defined]


def scalar_indexing() -> Any:
    """The mode in which FlexAttention calls a mask_mod under torch.vmap: tensors may be indexed with scalars."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


#: Where the captured tensor and its indices begin among the arguments of an exported look-up.
EXPORTED_LOOKUP_ARGUMENTS = 3


def is_exported_lookup(node: torch.fx.Node) -> bool:
    """True if `node` of a mask_mod is how torch.export writes `captured[index]`: the call of an autograd function, with
    the function's and the arguments' layout and its name in front."""
    name = node.args[2] if len(node.args) > EXPORTED_LOOKUP_ARGUMENTS else None
    is_call = getattr(node.target, "__name__", "") == "flat_apply"
    return is_call and isinstance(name, str) and name.endswith("_higher_order_op.ModIndex")


def watch_flex_attention(
    allows_cpu_training: Callable[[Any], bool], notice_eager: Callable[[], str]
) -> None:
    """Has PyTorch's FlexAttention ask us, from now on, in two places; everything else stays as it is.

    Args:
        allows_cpu_training: whether CPU tensors that need gradients are welcome, asked while Dynamo traces for a
            backend, which is the argument, or while torch.export runs the model (None).
        notice_eager: called before attention is computed eagerly: by FlexAttention itself, or where a graph broke at
            its operator. Not where a graph that a compiler was given runs it. It returns why that happens inside of a
            compiled function, which FlexAttention's refusal to train on a CPU then says too, else an empty text.
    """
    from torch.nn.attention import flex_attention as flex

    if getattr(flex._validate_device, "is_ours", False):
        return
    validate_device = flex._validate_device
    notice = torch.compiler.disable(notice_eager)

    @torch.compiler.disable
    def validate_eager(query: Tensor, key: Tensor, value: Tensor) -> None:
        reason = notice_eager()
        try:
            validate_device(query, key, value)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error} {reason}".strip()) from None

    @torch._dynamo.assume_constant_result
    def is_welcome() -> bool:
        return allows_cpu_training(backend_that_dynamo_traces_for())

    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        if not torch.compiler.is_compiling():
            validate_eager(query, key, value)
        elif query.device.type != "cpu" or not is_welcome():
            validate_device(query, key, value)

    # Dynamo still reads it as a part of its callers, but does not compile it by itself: then it would not notice.
    torch._dynamo.eval_frame.skip_code(validate.__code__)
    validate.is_ours = True  # type: ignore[attr-defined]
    flex._validate_device = validate

    operator = torch.ops.higher_order.flex_attention
    kernels = operator.py_kernels
    dense = kernels[torch._C.DispatchKey.CompositeExplicitAutograd]

    def attention(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, *rest: Any) -> Any:
        mask_mod = rest[0][-1]
        if not isinstance(mask_mod, torch.fx.GraphModule):
            notice()
        return dense(q, k, v, score_mod, *rest)

    kernels[torch._C.DispatchKey.CompositeExplicitAutograd] = attention
    operator._dispatch_cache.clear()  # of earlier calls


@contextmanager
def attention_replaced(
    flex_operator: Callable[..., Any], sdpa: Callable[..., Any]
) -> Iterator[None]:
    """Has PyTorch's FlexAttention call `flex_operator` in place of its operator, also in eager code and for CPU tensors
    that need gradients, and `torch.nn.functional` show `sdpa`; whoever has another reference to
    `scaled_dot_product_attention` gets an error of PyTorch's from it. For all threads."""
    import torch.nn.functional as F
    from torch.nn.attention import flex_attention as flex

    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        pass

    validate.is_ours = True  # type: ignore[attr-defined]
    replacements = {
        (flex, "flex_attention_hop"): flex_operator,
        (flex, "_validate_device"): validate,
        (flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"): True,  # or eager code compiles itself
        (F, "scaled_dot_product_attention"): sdpa,
    }
    _know_torch_functions()
    previous = {(owner, name): getattr(owner, name) for owner, name in replacements}
    switches = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDPA}
    try:
        for (owner, name), value in replacements.items():
            setattr(owner, name, value)
        for name in switches:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
        yield
    finally:
        for (owner, name), value in previous.items():
            setattr(owner, name, value)
        for name, was_enabled in switches.items():
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(was_enabled)


@cache
def _know_torch_functions() -> None:
    """Has PyTorch write down which functions are its own; it does so once, at first use."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    torch.overrides.get_overridable_functions()
    get_torch_obj_rule_map()


_SDPA = ("flash", "mem_efficient", "math", "cudnn")  # what runs it, on CPUs too
