"""PyTorch's registry of flash attention: `activate_flash_attention_impl("MAGI")`.

    import magi_compile  # registers "MAGI"
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("MAGI")  # restore_flash_attention_impl() undoes it

From then on `torch.nn.attention.varlen.varlen_attn` runs on our kernels, on GPUs and CPUs, and so does what
`scaled_dot_product_attention` gives to flash attention on GPUs. Calls that our kernels do not have go to PyTorch's own
flash attention, with one warning for each reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import varlen as _varlen  # noqa: F401  (defines the ops)

from magi_compile._compat import below_autograd
from magi_compile._kept import Made, Memo
from magi_compile._warnings import warn_once
from magi_compile.kernels.select import problem_on, select
from magi_compile.masks import AttnSlices
from magi_compile.ops.define import define, gradients
from magi_compile.ops.library import plan_of_call

# The ops that become ours, with the devices on which they do. Not every version of PyTorch has each of the first three.
_VARLEN = ("_varlen_attn", "_varlen_attn_out", "_varlen_attn_backward")
_SDPA = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")


class _Handle:
    """A registration that is active until it is removed."""

    def __init__(self, libraries: list[Library]):
        self.libraries = libraries

    def remove(self) -> None:
        self.libraries.clear()  # a library takes its kernels along


def activate() -> _Handle:
    """Makes the ops ours. PyTorch calls it in `activate_flash_attention_impl("MAGI")`,
    which the package has registered."""
    libraries = []
    for namespace, names, devices in (
        ("torch_attn", _VARLEN, ("CPU", "CUDA")),
        ("aten", _SDPA, ("CUDA",)),
    ):
        library = Library(namespace, "IMPL")
        if namespace == "torch_attn":
            differentiable = partial(
                _varlen_differentiable, torch.ops.torch_attn._varlen_attn.default
            )
            for device in devices:
                library.impl(_VARLEN[0], differentiable, f"Autograd{device}", with_keyset=True)
        for name in names:
            op: Any = getattr(getattr(torch.ops, namespace), name, None)
            for device in devices if op is not None else ():
                theirs = _kernel_of(op.default, device)
                if theirs is not None:
                    call = partial(_run, name, _Op(op.default, theirs))
                    library.impl(name, call, device, with_keyset=True, allow_override=True)
        libraries.append(library)
    return _Handle(libraries)


def _kernel_of(op: Any, device: str) -> Any:
    """The kernel that runs `op` on a device now, or None if nothing does (a PyTorch without CUDA)."""
    try:
        return torch.library.get_kernel(op, device)
    except RuntimeError:
        return None


class _Op(NamedTuple):
    """An op of PyTorch's, and the kernel that it has without us."""

    op: Any
    theirs: Any

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name; the schemas of PyTorch's versions have different ones."""
        arguments = self.op._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments}
        given.update(zip(given, args, strict=False))
        return {**given, **kwargs}

    def fall_back(self, why: str, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs PyTorch's own kernel."""
        warn_once(f"{self.op} runs on PyTorch's own flash attention instead of 'MAGI': {why}")
        return self.theirs.call_boxed(keys, *args, **kwargs)


# What a call is, and why it may not be ours


class PackedCall(NamedTuple):
    """Attention of packed tensors, as our ops take it."""

    q: Tensor  # [total_q, nheads_q, head_dim]
    k: Tensor  # [total_k, nheads_kv, head_dim]
    v: Tensor
    slices: AttnSlices
    softmax_scale: float

    def forward(self) -> tuple[Tensor, Tensor]:
        """`(out [total_q, nheads_q, head_dim], lse [nheads_q, total_q])`."""
        out, lse, _ = torch.ops.magi.ffa_fwd(*self._tensors(), *self._mask(), *self._options())
        return out, lse

    def backward(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        tensors = (dout, dlse, *self._tensors(), out, lse)
        options = (*self._options(), deterministic)
        return torch.ops.magi.ffa_bwd(*tensors, *self._mask(), *options)[:3]  # type: ignore[no-any-return]

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def _mask(self) -> tuple[Sequence[Tensor], list[Tensor]]:
        return self.slices.lists, plan_of_call(self.q, self.k, self.v, self.slices, 0.0, "")

    def _options(self) -> tuple[float, float, str]:
        return self.softmax_scale, 0.0, ""


def call_of_varlen(given: dict[str, Any]) -> PackedCall | str:
    """The call that the arguments of `torch_attn::_varlen_attn` stand for, or why PyTorch's own kernel must run it.

    By name, `query [total_q, Hq, D]`, `key` and `value [total_k, Hkv, D]`, `cu_seq_q` and `cu_seq_k`
    `[sequences + 1]`, `is_causal`, `window_size` (left, right; -1 for no limit), `scale`; what a version of PyTorch
    does not have may be missing. Windows are aligned at the last row and the last key of a sequence. Raises
    ValueError where `cu_seq_q` or `cu_seq_k` does not begin with 0, decreases, or goes beyond the tokens.
    """
    for name in ("seqused_k", "block_table", "num_splits"):
        if given.get(name) is not None:
            return f"`{name}` is given"
    q, k, v = given["query"], given["key"], given["value"]
    cu_q, cu_k = given["cu_seq_q"], given["cu_seq_k"]
    if cu_k is None:
        return "`cu_seq_k` is None"
    why = _refusal(q, k, v)
    if why:
        return why
    window = tuple(given.get("window_size") or (-1, -1))
    lists = _slices_of_lists(cu_q, cu_k, bool(given["is_causal"]), window)
    for name, end, tokens in (("q", lists.seqlen_q, len(q)), ("k", lists.seqlen_k, len(k))):
        if end > tokens:
            raise ValueError(
                f"`cu_seq_{name}` must end at or before the last of {tokens} tokens, got {end}"
            )
    slices = _with_totals(lists, len(q), len(k))
    return PackedCall(q, k, v, slices, _scale(given["scale"], q))


def call_of_sdpa(given: dict[str, Any]) -> PackedCall | str:
    """The call that the arguments of `aten::_scaled_dot_product_flash_attention` stand for, or why PyTorch's own
    kernel must run it. By name, `query [B, Hq, L, D]`, `key` and `value [B, Hkv, S, D]`, `dropout_p`, `is_causal`,
    `scale`."""
    q, k, v = (given[name].transpose(1, 2).flatten(0, 1) for name in ("query", "key", "value"))
    batch, _, rows, _ = given["query"].shape
    keys = given["key"].shape[2]
    if given["dropout_p"]:
        return f"`dropout_p` is {given['dropout_p']}"
    if given.get("return_debug_mask"):
        return "`return_debug_mask` is set"
    if given["is_causal"] and rows != keys:
        return f"a causal mask of {rows} rows and {keys} keys"
    why = _refusal(q, k, v)
    if why:
        return why
    slices = _slices_of_batch(batch, rows, keys, given["is_causal"], q.device)
    return PackedCall(q, k, v, slices, _scale(given["scale"], q))


def _refusal(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The reason why no kernel of ours runs attention of these tensors."""
    if v.shape[2] != q.shape[2]:
        return f"`value` has head_dim {v.shape[2]} and `query` has {q.shape[2]}"
    if q.shape[1] % k.shape[1]:
        return f"the {q.shape[1]} heads of `query` are not a multiple of the {k.shape[1]} heads of `key`"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"  # slices are made on the host
    return _refusal_of_kernels(q.device, q.dtype, (q.shape[1], k.shape[1], q.shape[2], v.shape[2]))


@lru_cache(maxsize=1024)
def _refusal_of_kernels(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int, int]
) -> str:
    try:
        select(problem_on(device, dtype, heads, 1.0))
    except NotImplementedError as error:
        return str(error)
    return ""


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[2] ** -0.5 if scale is None else float(scale)


@lru_cache(maxsize=64)
def _slices_of_batch(
    batch: int, rows: int, keys: int, is_causal: bool, device: torch.device
) -> AttnSlices:
    """All entries of a batch, one behind the other. Kept, so that the plan is made once."""
    q_ranges, k_ranges = (
        [(entry * length, (entry + 1) * length) for entry in range(batch)]
        for length in (rows, keys)
    )
    types = [int(is_causal)] * batch
    with torch.inference_mode(False):
        totals = (batch * rows, batch * keys)
        return AttnSlices.from_lists(q_ranges, k_ranges, types, *totals, device=device)


# Of `cu_seq_q` and `cu_seq_k`: all layers of a step, forward and backward, share slices and plan.
_of_lists: Memo[AttnSlices] = Memo(256, AttnSlices.tensors)


def _slices_of_lists(
    cu_q: Tensor, cu_k: Tensor, is_causal: bool, window: tuple[Any, ...]
) -> AttnSlices:
    """The slices of packed sequences; waits for a GPU when lists are new."""

    def make() -> Made:
        try:
            given: Any = window  # checked there
            return Made(AttnSlices.from_cu_seqlens(cu_q, cu_k, causal=is_causal, window=given))
        except (TypeError, ValueError) as error:  # in the names of PyTorch's arguments
            message = str(error).replace("cu_seqlens_", "cu_seq_")
            raise type(error)(message.replace("`window`", "`window_size`")) from None

    return _of_lists.get((cu_q, cu_k), (is_causal, window), make, cu_q.device)


def _with_totals(slices: AttnSlices, total_q: int, total_k: int) -> AttnSlices:
    """`slices` among more tokens, which see nothing and are not seen."""
    if (slices.seqlen_q, slices.seqlen_k) == (total_q, total_k):
        return slices
    return AttnSlices.unchecked(*slices.lists, total_q, total_k)


# The ops


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """`values` with the strides of `torch.empty_like(tensor)`, which PyTorch's shape functions promise."""
    wanted = torch.empty_like(tensor)
    return values if values.stride() == wanted.stride() else wanted.copy_(values)


def _varlen_forward(call: PackedCall, given: dict[str, Any]) -> Any:
    out, lse = call.forward()
    state = torch.zeros(2, dtype=torch.uint64, device=out.device)
    return _like(call.q, out), lse, state


def _varlen_out(call: PackedCall, given: dict[str, Any]) -> Any:
    out, lse = call.forward()
    given["out"].copy_(out)
    return lse


def _varlen_backward(call: PackedCall, given: dict[str, Any]) -> Any:
    found = call.backward(given["grad_out"], None, given["out"], given["lse"])
    return tuple(map(_like, (call.q, call.k, call.v), found))


# PyTorch's autograd of varlen_attn says that the log-sum-exp has a gradient, and drops it.


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, keys: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, state = below_autograd(op, keys, *args)
        ctx.given = _Op(op, None).named(args, {})
        for name in ("seqused_k", "block_table"):
            if ctx.given.get(name) is not None:
                raise RuntimeError(f"`{name}` must be None where gradients are wanted")
        tensors = ("query", "key", "value", "cu_seq_q", "cu_seq_k")
        ctx.save_for_backward(*(ctx.given.pop(name) for name in tensors), out, lse, state)
        ctx.mark_non_differentiable(state)
        ctx.set_materialize_grads(False)
        return out, lse, state

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None
    ) -> tuple[Any, ...]:
        q, k, v, cu_q, cu_k, out, lse, state = ctx.saved_tensors
        others = (None,) * (len(ctx.needs_input_grad) - 5)
        if dout is None and dlse is None:
            return (None, None, None, None, None, *others)
        dout = torch.zeros_like(out) if dout is None else dout
        if dlse is None:
            names = {"query": q, "key": k, "value": v, "cu_seq_q": cu_q, "cu_seq_k": cu_k}
            results = {"grad_out": dout, "out": out, "lse": lse, "rng_state": state}
            given = {**ctx.given, **names, **results}
            op = torch.ops.torch_attn._varlen_attn_backward.default
            found = op(*(given[argument.name] for argument in op._schema.arguments))
        else:
            options = (ctx.given[name] for name in ("is_causal", "scale", "window_size"))
            op = torch.ops.magi.varlen_backward.default
            found = gradients(op, dout, dlse, q, k, v, cu_q, cu_k, out, lse, *options)
        return (None, None, *found, *others)


def _varlen_differentiable(op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    given = tuple(_Op(op, None).named(args, kwargs).values())
    if torch.is_grad_enabled() and any(x.requires_grad for x in given[:3]):
        return _Varlen.apply(op, keys, *given)
    return below_autograd(op, keys, *given)


def _varlen_backward_with_lse(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    cu_k, out, lse, is_causal, scale, window = rest
    given = {"query": q, "key": k, "value": v, "cu_seq_q": cu_q, "cu_seq_k": cu_k}
    call = call_of_varlen({**given, "is_causal": is_causal, "scale": scale, "window_size": window})
    if isinstance(call, str):
        raise NotImplementedError(
            "the log-sum-exp of varlen_attn has gradients only where 'MAGI' runs the call, which "
            f"PyTorch's own flash attention did here: {call}"
        )
    return tuple(map(_like, (q, k, v), call.backward(dout, dlse, out, lse)))


_lib = Library("magi", "FRAGMENT")
define(
    _lib,
    "varlen_backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor cu_seq_q, "
    "Tensor? cu_seq_k, Tensor out, Tensor lse, "
    "bool is_causal, float? scale, int[]? window_size) -> (Tensor, Tensor, Tensor)",
    _varlen_backward_with_lse,
    lambda dout, dlse, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))),
)


def _sdpa_forward(call: PackedCall, given: dict[str, Any]) -> Any:
    query = given["query"]
    batch, heads, rows, _ = query.shape
    out, lse = call.forward()
    out = _like(query, out.unflatten(0, (batch, rows)).transpose(1, 2))
    lse = lse.view(heads, batch, rows).transpose(0, 1).contiguous()
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    debug_mask = torch.empty(0, dtype=query.dtype, device=query.device)
    return out, lse, None, None, rows, given["key"].shape[2], seed, offset, debug_mask


def _sdpa_backward(call: PackedCall, given: dict[str, Any]) -> Any:
    dout, out = (given[name].transpose(1, 2).flatten(0, 1) for name in ("grad_out", "out"))
    lse = given["logsumexp"].transpose(0, 1).flatten(1)
    found = call.backward(dout, None, out, lse.contiguous())
    tensors = (given["query"], given["key"], given["value"])
    padded = (
        x.unflatten(0, (y.shape[0], -1)).transpose(1, 2)
        for x, y in zip(found, tensors, strict=True)
    )
    return tuple(map(_like, tensors, padded))


# By the name of an op: what reads its arguments, and what runs the call.
_CALLS: dict[str, tuple[Callable[..., PackedCall | str], Callable[..., Any]]] = {
    "_varlen_attn": (call_of_varlen, _varlen_forward),
    "_varlen_attn_out": (call_of_varlen, _varlen_out),
    "_varlen_attn_backward": (call_of_varlen, _varlen_backward),
    "_scaled_dot_product_flash_attention": (call_of_sdpa, _sdpa_forward),
    "_scaled_dot_product_flash_attention_backward": (call_of_sdpa, _sdpa_backward),
}


def _run(name: str, op: _Op, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """The op called `name`, on our kernels or on PyTorch's."""
    read, run = _CALLS[name]
    given = op.named(args, kwargs)
    call = read(given)
    if isinstance(call, str):
        return op.fall_back(call, keys, args, kwargs)
    return run(call, given)
