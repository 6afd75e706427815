"""A sequence over ranks, as a training step needs it: whose tokens are where, and attention over all of them.

p = plan(mask, mesh)                  the mask of the whole sequence, the same on every rank
tokens = p.shard(tokens, dim=1)       this rank's tokens
labels = p.labels(tokens, dim=1)      what they predict: shifted first, then spread
out = p.attention(q, k, v)            in each layer
logits = p.unshard(logits, dim=1)     in the order of the sequence again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from magi_compile import _compat
from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.explain import PlanExplanation, explain_plan
from magi_compile.dtensor.planning.cost import DEFAULT_COST, CostModel
from magi_compile.dtensor.planning.dispatch import check_count
from magi_compile.dtensor.planning.rank_plan import (
    ContextParallelOptions,
    PlanTensors,
    RankPlan,
    plan_rank_together,
)
from magi_compile.masks import AttnSlices, slices_from_block_mask
from magi_compile.masks.block_mask import one_block_mask
from magi_compile.ops.dtensors import (
    PACKED,
    PADDED,
    are_distributed,
    shards_of,
    wrapped,
    wrapped_lse,
)
from magi_compile.ops.layout import in_memory_order, memory_order

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Mask: TypeAlias = Union["BlockMask", AttnSlices, MaskMod, None]

DEFAULTS = ContextParallelOptions()


class SpreadSlices(AttnSlices):
    """The mask of a whole sequence whose tokens are spread by `plan`."""

    plan: SequencePlan
    digest: Tensor


class SpreadMask:
    """The mask_mod of a BlockMask for tokens that are spread by `plan`: it stands for the whole mask, and is never evaluated."""

    def __init__(self, plan: SequencePlan):
        self.plan = plan
        self.digest = plan.meta[:1].clone()

    def __call__(self, *_: Any) -> Tensor:
        raise RuntimeError(
            "this BlockMask is for tokens that are spread over ranks; call attention inside "
            "`with context_parallel(mesh, mask=plan)`, or plan.attention(q, k, v)"
        )


class SequencePlan:
    """How the tokens of one sequence are spread over ranks, and the attention among them. Made by `plan`.

    Use it in eager code or in a compiled function, as an argument or captured. A new plan of the same lengths compiles nothing
    again.

    Args:
        slices: the mask of the whole sequence.
        planned: this rank's plan.
        group: the ranks.
        device: of the mesh.
        cost: the rates by which it was planned.

    Attributes:
        total: tokens of the sequence.
        seqlen_local: tokens of a rank, the same on all: `total / cp_size`, or more with padding.
        cp_size: number of ranks.
        rank: this rank's number among them.
        positions: int64 `[seqlen_local]`, on the device of the mesh: the position in the sequence of each of this rank's tokens;
            0 for padding.
        is_padding: bool `[seqlen_local]`, on the same device. Padding sees nothing, nothing sees it, and attention returns 0 for it.
        has_padding: whether any rank has padding.
        slices: the mask of the whole sequence, for `magi_compile.flex_flash_attention` inside of `context_parallel`.
    """

    def __init__(
        self,
        slices: AttnSlices,
        planned: RankPlan,
        group: dist.ProcessGroup,
        device: torch.device,
        cost: CostModel = DEFAULT_COST,
    ):
        where = planned.dispatch
        self.total, self.seqlen_local = where.total, where.seqlen_local
        self.cp_size, self.rank = where.cp_size, planned.rank
        self.has_padding = where.total_padded > where.total
        positions = where.positions(planned.rank)
        is_padding = positions >= where.total
        self.positions = positions.masked_fill(is_padding, 0).to(device)
        self.is_padding = is_padding.to(device)
        self.device = device
        self.group_name = group.group_name
        self.meta, self.data = planned.tensors(device)
        for x in (self.meta, self.data):
            _compat.expect_other_lengths(x)
        pairs, area = where.total * where.total, slices.area()
        self.is_full = area == pairs
        self.is_causal = area == (pairs + where.total) // 2 and _is_causal(slices)
        lists = (slices.q_ranges, slices.k_ranges, slices.mask_types)
        whole = SpreadSlices.unchecked(*lists, slices.seqlen_q, slices.seqlen_k)
        vars(whole).update(plan=self, digest=self.meta[:1].clone())
        self.slices = cast(SpreadSlices, whole)
        self._group, self._where, self._planned, self._cost = group, where, planned, cost
        self._ranks = dist.get_process_group_ranks(group)
        self._block_mask: BlockMask | None = None

    def __repr__(self) -> str:
        return (
            f"SequencePlan(total={self.total}, seqlen_local={self.seqlen_local}, rank={self.rank} of {self.cp_size}, "
            f"chunk_size={self._where.chunk_size}, device='{self.device}')"
        )

    @property
    def block_mask(self) -> BlockMask:
        """The mask for `flex_attention` inside `context_parallel`. Evaluated anywhere else, it raises."""
        if self._block_mask is None:
            lengths = (self.seqlen_local, self.seqlen_local)
            self._block_mask = one_block_mask(SpreadMask(self), 1, *lengths, self.device)
        return self._block_mask

    def has_the_tokens_of(self, other: SequencePlan) -> bool:
        """Whether every rank holds the same tokens by both plans, in the same order."""
        here, there = self._where, other._where
        return (here.total, here.chunk_size, self.group_name) == (
            there.total,
            there.chunk_size,
            other.group_name,
        ) and torch.equal(here.chunks, there.chunks)

    def explain(self, cost: CostModel | None = None) -> PlanExplanation:
        """What the plan asks of all ranks: balance, communication, stages, predicted time. Does not communicate.

        Args:
            cost: the rates of the prediction, for example from `calibrate`. None takes those of the plan's options; the default
                rates are round figures for H200s, heads 64:8, head_dim 128.

        Returns:
            The explanation; print it.
        """
        return explain_plan(self._planned, self._cost if cost is None else cost)

    def permutation(self, restore: bool = False) -> Tensor:
        """Which token lies where, in the form of PyTorch's load balancers: after it, rank r holds the r-th of equal parts.

        The plan itself serves where PyTorch asks for a `load_balancer`.

        Args:
            restore: whether to give the inverse, which takes tokens of all ranks to their order in the sequence.

        Returns:
            int64 `[1, total]`, on the device of the mesh.

        Raises:
            ValueError: the sequence is padded, which that form cannot say.
        """
        if self.has_padding:
            raise ValueError(
                f"a permutation needs a plan without padding, but {self.total} tokens are padded to {self.seqlen_local} on each of "
                f"{self.cp_size} ranks"
            )
        where = self._where.inverse_positions() if restore else self._where.positions()
        return where[None].to(self.device)

    # What a balancer has it under, in PyTorch and in torchtitan.
    _generate_indices = generate_permutation = permutation

    # Tokens

    def shard(self, x: Tensor, dim: int, *, padding: float = 0) -> Tensor:
        """This rank's part of a tensor over the whole sequence.

        Args:
            x: any dtype and device, the same on every rank; `total` entries along `dim`.
            dim: the dimension of the sequence.
            padding: what entries of padding hold. Keep them out of the loss: `labels` does that.

        Returns:
            A new tensor with `seqlen_local` entries along `dim`. Differentiable: the gradient has this rank's share,
            0 elsewhere.

        Raises:
            ValueError: `x` has another length.
        """
        _check_length("x", x, dim, self.total, "of the whole sequence")
        local = x.index_select(dim, self.positions.to(x.device))
        if self.has_padding:
            sizes = [1] * x.ndim
            sizes[dim] = self.seqlen_local
            local = local.masked_fill(self.is_padding.to(x.device).view(sizes), padding)
        return local

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """A tensor over the whole sequence from every rank's part of it; all ranks call it together. Without gradients.

        Args:
            x: any dtype, on a device that the group reaches; `seqlen_local` entries along `dim`.
            dim: the dimension of the sequence.

        Returns:
            A new tensor with `total` entries along `dim`, in the order of the sequence, the same on every rank.

        Raises:
            ValueError: `x` has another length.
        """
        _check_length("x", x, dim, self.seqlen_local, "of this rank")
        with torch.no_grad():
            local = x.detach().movedim(dim, 0).contiguous()
            parts = [torch.empty_like(local) for _ in range(self.cp_size)]
            dist.all_gather(parts, local, self._group)
            order = self._where.inverse_positions()[: self.total].to(x.device)
            return torch.cat(parts).index_select(0, order).movedim(0, dim)

    def labels(
        self,
        tokens: Tensor,
        dim: int = -1,
        *,
        documents: Tensor | None = None,
        is_shifted: bool = False,
        ignore_index: int = -100,
    ) -> Tensor:
        """The labels of this rank's tokens: for each one the next token of the sequence.

        Call it on the whole sequence. Shifting this rank's tokens instead would take the next token of the rank, which is wrong.

        Args:
            tokens: integers over the whole sequence, the same on every rank; `total` entries along `dim`. Entries may be
                `ignore_index` already.
            dim: the dimension of the sequence.
            documents: the document number of each token, broadcastable to `tokens`. The last token of each document then has the
                label `ignore_index`, as the last token of the sequence has.
            is_shifted: whether `tokens` already are the labels.
            ignore_index: the label of tokens that predict nothing, padding included; by default that of `cross_entropy`.

        Returns:
            The dtype of `tokens`, with `seqlen_local` entries along `dim`.

        Raises:
            ValueError: `tokens` or `documents` do not fit.
        """
        _check_length("tokens", tokens, dim, self.total, "of the whole sequence")
        if not is_shifted:
            tokens = _next(tokens, dim, ignore_index)
        if documents is not None:
            dim = dim % tokens.ndim - tokens.ndim
            _check_length("documents", documents, dim, self.total, "of the whole sequence")
            differs = documents.diff(dim=dim) != 0
            is_last = torch.cat([differs, torch.ones_like(differs.narrow(dim, 0, 1))], dim)
            tokens = tokens.masked_fill(is_last, ignore_index)
        return self.shard(tokens, dim, padding=ignore_index)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, for example of losses to print. All ranks call it together. Not differentiable."""
        with torch.no_grad():
            x = x.detach().clone()
            dist.all_reduce(x, group=self._group)
            return x

    # Attention

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        return_lse: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        """Attention of this rank's tokens over the whole sequence, by the plan's mask; differentiable. All ranks call it together.

        Args:
            q: `[B, Hq, seqlen_local, D]`, or packed `[seqlen_local, Hq, D]`; fp32, bf16 or fp16 (under autocast any float). q, k and v
                may be DTensors: tokens sharded on the mesh dimension of the plan, heads on any other dimension.
            k: `[B, Hkv, seqlen_local, D]` or `[seqlen_local, Hkv, D]`; Hkv divides Hq.
            v: `[B, Hkv, seqlen_local, Dv]` or `[seqlen_local, Hkv, Dv]`.
            scale: factor of the scores; None stands for `D ** -0.5`.
            softcap: scores become `softcap * tanh(scores / softcap)`; 0.0 for none.
            return_lse: whether to return the log-sum-exp of the scores as well.

        Returns:
            out `[B, Hq, seqlen_local, Dv]`, in the memory order of q, or `[seqlen_local, Hq, Dv]`; with return_lse `(out, lse)`, lse
            fp32 `[B, Hq, seqlen_local]` or `[Hq, seqlen_local]`.

        Raises:
            ValueError: shapes, dtypes or devices do not fit each other or the plan; on every rank, if the ranks have planned
                different masks.
            NotImplementedError: no kernel runs this.
        """
        return self.attend(q, k, v, self.meta, scale, softcap, return_lse)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: Tensor,
        scale: float | None,
        softcap: float,
        return_lse: bool,
    ) -> Any:
        """`attention` by `meta`, which says what that of the plan says."""
        for name, x in {"q": q, "k": k, "v": v}.items():
            if x.ndim not in (3, 4) or x.ndim != q.ndim:
                raise ValueError(
                    f"`{name}` must be [B, H, seqlen_local, D] or [seqlen_local, H, D], like `q`, got shape {list(x.shape)}"
                )
        if are_distributed(q, k, v):
            layout = PADDED if q.ndim == 4 else PACKED
            shards = shards_of({"q": q, "k": k, "v": v}, layout, self._ranks)
            out, lse = self.attend(*shards[:3], meta, scale, softcap, True)
            out = wrapped(out, shards)
            return (out, wrapped_lse(lse, shards, layout)) if return_lse else out
        for name, x in {"q": q, "k": k, "v": v}.items():
            if x.device != self.device:
                raise ValueError(
                    f"`{name}` must be on the device of the mesh, {self.device}, got {x.device}"
                )
            _check_length(name, x, 2 if x.ndim == 4 else 0, self.seqlen_local, "of this rank")
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x.to(dtype) for x in (q, k, v))
        tensors = PlanTensors(meta, self.data)
        if q.ndim == 3:
            out, lse = context_parallel_attention(
                q, k, v, tensors, self.group_name, softmax_scale=scale, softcap=softcap
            )
            return (out, lse) if return_lse else out
        batch = q.shape[0]
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != batch:
                raise ValueError(
                    f"`{name}` must have the batch size of `q`, {batch}, got {x.shape[0]}"
                )
        # Entries of a batch have one mask, so they are more heads.
        nheads = q.shape[1]
        order = memory_order(q.stride())
        q, k, v = (x.permute(2, 0, 1, 3).flatten(1, 2) for x in (q, k, v))
        out, lse = context_parallel_attention(
            q, k, v, tensors, self.group_name, softmax_scale=scale, softcap=softcap
        )
        out = in_memory_order(out.unflatten(1, (batch, nheads)).permute(1, 2, 0, 3), order)
        return (out, lse.unflatten(0, (batch, nheads))) if return_lse else out


@overload
def plan(
    mask: Mask,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    seqlen: int | None = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
) -> SequencePlan: ...


@overload
def plan(
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    masks: Sequence[Mask],
    weights: Sequence[int] | None = None,
    seqlen: int | None = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
) -> list[SequencePlan]: ...


@overload
def plan(
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    masks: Mapping[str, Mask],
    weights: Mapping[str, int] | None = None,
    seqlen: int | None = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
) -> dict[str, SequencePlan]: ...


def plan(
    mask: Any = None,
    mesh: Any = None,
    *,
    masks: Any = None,
    weights: Any = None,
    seqlen: int | None = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
) -> Any:
    """Spreads a sequence over ranks by its attention mask: equal work for each rank, and little communication.

    Every rank calls it with the same mask. It does not communicate; the first attention with a plan compares the plans of all
    ranks. Recent plans are kept. With a mask on a GPU it waits for the device.

    Args:
        mask: the mask of the whole sequence, shared by all batch entries: a BlockMask for one batch entry and all heads (PyTorch's or
            that of `magi_compile.create_block_mask`), `AttnSlices`, or a mask_mod. None is causal.
        mesh: the ranks: a mesh of one dimension (`mesh["cp"]` of a larger one) or a process group.
        masks: instead of `mask`, the masks of a model whose layers differ: a list, or a dict by name. Tokens are placed once, so that
            each rank has the same total work.
        weights: how many layers have each of `masks`, as a list or dict like it; 1 each by default.
        seqlen: tokens of the sequence; required for a mask_mod and for None.
        options: how to spread; the same on every rank.
        permutation: for tokens that are permuted already and cut in equal parts: `[S]` or `[1, S]`, which token lies where, or a load
            balancer of PyTorch or torchtitan. The mask stays in the sequence's own order, and `options` do not place tokens.

    Returns:
        This rank's `SequencePlan`. For `masks`, one plan for each, in a list or dict like it; all hold the same tokens.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: the mesh has more than one dimension or lacks this process; `seqlen` is missing or differs from the mask's; `masks`
            have different lengths; `weights` do not fit them; `permutation` is not a permutation of the sequence.
        UnsupportedMaskError: slices cannot express the mask.
        NotImplementedError: there are not as many keys as queries, or batch entries have masks of their own.
    """
    group, device = group_of(mesh), _device_of(mesh)
    is_one = masks is None
    if not is_one and mask is not None:
        raise ValueError("one of `mask` and `masks` must be None, got both")
    if is_one and weights is not None:
        raise ValueError("`weights` must be None where `masks` is None")
    given = [mask] if is_one else masks
    if not isinstance(given, (list, tuple, Mapping)):
        raise TypeError(f"`masks` must be a list or a dict of masks, got {type(given).__name__}")
    listed = list(given.values()) if isinstance(given, Mapping) else list(given)
    counts = None if weights is None else _weights_of(weights, given)
    slices = [_slices_of(x, seqlen, device) for x in listed]
    ranks = group.size(), group.rank()
    where = None if permutation is None else _permutation_of(permutation)
    planned = plan_rank_together(slices, *ranks, options, weights=counts, permutation=where)
    made = [
        SequencePlan(of_mask, of_rank, group, device, options.cost)
        for of_mask, of_rank in zip(slices, planned, strict=True)
    ]
    if is_one:
        return made[0]
    return dict(zip(given, made, strict=True)) if isinstance(given, Mapping) else made


def _permutation_of(given: Any) -> Tensor:
    """int64 `[S]`, on the CPU."""
    x = given if isinstance(given, Tensor) else _compat.indices_of_load_balancer(given)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"`permutation` must be a tensor or a load balancer of PyTorch's or torchtitan's, got {type(given).__name__}"
        )
    if x.dtype.is_floating_point or x.dtype == torch.bool or x.ndim not in (1, 2):
        raise ValueError(
            f"`permutation` must be integers [S] or [1, S], got {x.dtype} {list(x.shape)}"
        )
    if x.ndim == 2:
        if not bool((x == x[:1]).all()):
            raise NotImplementedError(
                "`permutation` must be the same for all entries of a batch, got different ones; permute all entries alike"
            )
        x = x[0]
    return x.to("cpu", torch.int64)


def _weights_of(weights: Any, masks: Any) -> list[int]:
    if isinstance(weights, Mapping) != isinstance(masks, Mapping):
        raise TypeError(
            f"`weights` must be a {type(masks).__name__} like `masks`, got {type(weights).__name__}"
        )
    if not isinstance(masks, Mapping):
        return list(weights)
    if set(weights) != set(masks):
        raise ValueError(
            f"`weights` must have the names of `masks`, {list(masks)}, got {list(weights)}"
        )
    return [weights[name] for name in masks]


def _slices_of(mask: Any, seqlen: int | None, device: torch.device) -> AttnSlices:
    from torch.nn.attention.flex_attention import BlockMask

    if seqlen is not None:
        check_count("seqlen", seqlen, 1)
    if isinstance(mask, BlockMask):
        if isinstance(mask.mask_mod, SpreadMask):
            raise ValueError(
                "`mask` must cover the whole sequence, got the mask of a plan; pass the original mask"
            )
        if mask.shape[0] != 1:
            raise NotImplementedError(
                f"`mask` must be made for one batch entry, which all entries share, got {mask.shape[0]}; pack entries with "
                "masks of their own into one sequence, as documents"
            )
        slices = slices_from_block_mask(mask)
    elif isinstance(mask, AttnSlices):
        slices = mask
    elif mask is not None and not callable(mask):
        raise TypeError(
            f"`mask` must be a BlockMask, AttnSlices, a mask_mod or None, got {type(mask).__name__}"
        )
    elif seqlen is None:
        kind = "a mask_mod" if callable(mask) else "None (causal)"
        raise ValueError(
            f"`seqlen` must be given where `mask` is {kind}, which has no length, got None"
        )
    elif mask is None:
        slices = AttnSlices.causal(seqlen)
    else:
        slices = slices_from_block_mask(one_block_mask(mask, 1, seqlen, seqlen, device))
    lengths = (slices.seqlen_q, slices.seqlen_k)
    if seqlen is not None and lengths != (seqlen, seqlen):
        raise ValueError(f"`seqlen` must be the length of `mask`, {lengths[0]}, got {seqlen}")
    return slices.to("cpu")


def _is_causal(slices: AttnSlices) -> bool:
    return slices.content_key() == AttnSlices.causal(slices.seqlen_q).content_key()


def group_of(mesh: Any) -> dist.ProcessGroup:
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"`mesh` must be a DeviceMesh or a process group of which this process is a member, got {type(mesh).__name__}"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        which = f"mesh[{names[-1]!r}]" if names else "a mesh with mesh_dim_names, by name"
        raise ValueError(
            f"`mesh` must have one dimension, the ranks that share a sequence, got {mesh.ndim}"
            f"{f' ({chr(44).join(names)})' if names else ''}; take one of them, {which}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"`mesh` must contain this process, rank {dist.get_rank()}, got {mesh}")
    return mesh.get_group()


def _device_of(mesh: DeviceMesh | dist.ProcessGroup) -> torch.device:
    if isinstance(mesh, DeviceMesh):
        kind = mesh.device_type
    else:
        kind = "cuda" if "nccl" in dist.get_backend(mesh) else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _check_length(name: str, x: Tensor, dim: int, length: int, whose: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"`dim` must be in [{-x.ndim}, {x.ndim}) for `{name}`, got {dim}")
    if x.shape[dim] != length:
        raise ValueError(
            f"`{name}` must have the {length} tokens {whose} in dimension {dim}, got {x.shape[dim]}"
        )


def _next(x: Tensor, dim: int, last: int) -> Tensor:
    """The next entry along `dim`, and `last` behind the end."""
    return torch.cat(
        [x.narrow(dim, 1, x.shape[dim] - 1), torch.full_like(x.narrow(dim, 0, 1), last)], dim
    )
