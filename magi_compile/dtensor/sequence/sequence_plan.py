"""A sequence over ranks, as a training step needs it: whose tokens are where, and attention over all of them.

p = plan(mask, mesh)                  the mask of the whole sequence, the same on every rank
tokens = p.shard(tokens, dim=1)       this rank's tokens
labels = p.labels(tokens, dim=1)      what they predict: shifted first, then spread
out = p.attention(q, k, v)            in each layer
logits = p.unshard(logits, dim=1)     in the order of the sequence again
text = p.keys.shard(text, dim=1)      of cross attention: this rank's keys
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.attention import context_parallel_attention
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.rank_plan import PlanTensors
from magi_compile.dtensor.sequence.explain import PlanExplanation, explain_plan
from magi_compile.dtensor.sequence.shared_heads import SharedHeads
from magi_compile.dtensor.sequence.spread_mask import SpreadMask, SpreadSlices
from magi_compile.dtensor.sequence.spread_tokens import SpreadTokens, check_length
from magi_compile.masks import AttnSlices
from magi_compile.masks.block_mask import one_block_mask
from magi_compile.ops.attention import AttnOutput
from magi_compile.ops.aux_request import asks_for_max_scores, returned
from magi_compile.ops.dtensors import (
    PACKED,
    PADDED,
    are_distributed,
    as_dtensors,
    heads_that_are_read,
    shards_of,
    share_of,
    shifted_score_mod,
)
from magi_compile.ops.layout import in_memory_order, memory_order
from magi_compile.ops.sinks import check_sinks, lse_with_sinks, out_with_sinks
from magi_compile.ops.validation import as_autocast, check_options, check_qkv

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

    from magi_compile.dtensor.sequence.make_plan import HostPlan


class SequencePlan(SpreadTokens):
    """A plan that spreads the tokens of one sequence over ranks and runs their attention. Made by `plan`.

    Use it in eager code or in a compiled function, as an argument or captured. A new plan of the same lengths compiles
    nothing again. Its attributes and methods of `SpreadTokens` are those of the queries.

    Args:
        host: the plan before it had a group and a device.
        attention: the ranks by which the plan is.
        tokens: all ranks that hold tokens; more than those where ranks share heads.
        heads: the ranks that share heads with this one; None where none does.
        device: of the mesh.
        keys: how the keys are spread, where they are not the tokens themselves.

    Attributes:
        head_ranks: how many ranks share the heads of their tokens; 1 where none does.
        is_exact: whether slices say the mask, all of it, for all batch entries and heads; only then there are `slices`.
        is_cross: whether the keys are another sequence than the queries.
    """

    def __init__(
        self,
        host: HostPlan,
        attention: dist.ProcessGroup,
        tokens: dist.ProcessGroup,
        heads: dist.ProcessGroup | None,
        device: torch.device,
        keys: SpreadTokens | None = None,
    ):
        planned, slices, where = host.planned, host.slices, host.planned.dispatch
        super().__init__(where, tokens.rank(), tokens, device)
        self.head_ranks, self._over = planned.head_ranks, attention.group_name
        self._heads: SharedHeads | None = None
        if heads is not None:
            names = (heads.group_name, tokens.group_name)
            self._heads = SharedHeads(*names, heads.size(), heads.rank())
        self._keys, self.is_cross = keys, keys is not None
        self.meta, self.data = planned.tensors(device)
        for x in (self.meta, self.data):
            _compat.expect_other_lengths(x)
        self.is_exact = slices is not None
        self.is_full = self.is_causal = False
        if slices is not None:
            pairs, area = where.total * where.keys.total, slices.area()
            self.is_full = area == pairs
            is_half = not self.is_cross and area == (pairs + where.total) // 2
            if is_half:
                causal = AttnSlices.causal(slices.seqlen_q)
                self.is_causal = slices.content_key() == causal.content_key()
            self._slices = self._spread(slices)
        self._planned, self._cost, self._of_unknown = planned, host.cost, host.of_unknown
        self._entries = planned.entries
        self._ranks = dist.get_process_group_ranks(tokens)
        self._block_mask: BlockMask | None = None

    def _spread(self, slices: AttnSlices) -> SpreadSlices:
        whole = SpreadSlices.unchecked(*slices.lists, slices.seqlen_q, slices.seqlen_k)
        vars(whole).update(plan=self, digest=self.meta[:1].clone())
        return cast(SpreadSlices, whole)

    @property
    def keys(self) -> SpreadTokens:
        """The spread of the keys; for self-attention, whose keys are its tokens, the plan itself."""
        return self if self._keys is None else self._keys

    @property
    def slices(self) -> SpreadSlices:
        """The mask for `magi_compile.flex_flash_attention` inside `context_parallel`."""
        if not self.is_exact:
            raise NotImplementedError(
                "`slices` of a plan say no blocks of bits, nor masks of each batch entry or head, "
                "which the mask of this plan has; call flex_attention with `block_mask`, or SequencePlan.attention"
            )
        return self._slices

    def _refuse_several(self, q: Tensor) -> None:
        """Raises where `q` has several batch entries or heads, and the mask is made for the first one alone."""
        batch = q.shape[0] if q.ndim == 4 else 1
        for index, name, what, number in (
            ("b", "B", "batch entry", batch),
            ("h", "H", "head", q.shape[1]),
        ):
            if index in self._of_unknown and number > 1:
                raise NotImplementedError(
                    f"`q` must have one {what}, because the mask_mod of the plan depends on it ({index}), got "
                    f"{number}; plan a BlockMask that is made for all of them, create_block_mask(..., {name}={number})"
                )

    @property
    def block_mask(self) -> BlockMask:
        """The mask for `flex_attention` inside `context_parallel`, and for `magi_compile.flex_attention` anywhere.
        Evaluated, it raises."""
        if self._block_mask is None:
            lengths = (self.seqlen_local, self.keys.seqlen_local)
            is_traced = torch.compiler.is_compiling()
            with nullcontext() if is_traced else _compat.outside_of_modes():
                self._block_mask = one_block_mask(SpreadMask(self), 1, *lengths, self.device)
        return self._block_mask

    def explain(self, cost: CostModel | None = None) -> PlanExplanation:
        """Explains the plan for all ranks: balance, communication, stages, predicted time. Does not communicate.

        Args:
            cost: the rates of the prediction, for example from `calibrate`. None takes those of the plan's options; the
                default rates are round figures for H200s, heads 64:8, head_dim 128.

        Returns:
            The explanation; print it.
        """
        return explain_plan(self._planned, self._cost if cost is None else cost)

    # Attention

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score_mod: Callable[..., Any] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        return_lse: Literal[False] = False,
        return_aux: None = None,
    ) -> Tensor: ...

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score_mod: Callable[..., Any] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        return_lse: Literal[True],
        return_aux: None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score_mod: Callable[..., Any] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        return_lse: Literal[False] = False,
        return_aux: AuxRequest,
    ) -> tuple[Tensor, AuxOutput]: ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score_mod: Callable[..., Any] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        return_aux: AuxRequest | None = None,
    ) -> Any:
        """Attention of this rank's tokens over the whole sequence, by the plan's mask; differentiable.
        All ranks call it together.

        Args:
            q: `[B, Hq, seqlen_local, D]`, or packed `[seqlen_local, Hq, D]`; fp32, bf16 or fp16, which autocast casts.
                q, k and v may be DTensors: tokens sharded on the mesh dimension of the plan, heads on any other
                    dimension.
            k: `[B, Hkv, keys.seqlen_local, D]` or `[keys.seqlen_local, Hkv, D]`; Hkv divides Hq.
            v: `[B, Hkv, keys.seqlen_local, Dv]` or `[keys.seqlen_local, Hkv, Dv]`.
            score_mod: what becomes of the scaled scores, as FlexAttention takes it: a function of a score and of batch
                entry, head, query and key in the whole sequence; differentiable. Gradients of tensors that it captures
                are this rank's parts: sum them over the ranks, as those of any replicated parameter. In compiled code
                for backend="magi" and `magi_compile.enable()`.
            scale: factor of the scores; None stands for `D ** -0.5`.
            softcap: scores become `softcap * tanh(scores / softcap)`; 0.0 for none.
            sinks: `[Hq]`, one more score of each head in every softmax, with a value of 0; differentiable. Its gradient
                is this rank's part: sum it over the ranks, as that of any replicated parameter. A DTensor where q is
                one, whose gradient is summed already.
            return_lse: whether to return the log-sum-exp of the scores as well.
            return_aux: `AuxRequest(lse=True, max_scores=True)` returns an `AuxOutput` as well, in place of return_lse.
                max_scores are the largest score of each of this rank's rows, over the keys of all ranks, as the softmax
                takes it: no sink is among them, and -inf where a row sees nothing. Not differentiable.

        Returns:
            out `[B, Hq, seqlen_local, Dv]`, in the memory order of q, or `[seqlen_local, Hq, Dv]`; with return_lse
            `(out, lse)`, with return_aux `(out, AuxOutput)`. lse and max_scores are fp32 `[B, Hq, seqlen_local]` or
            `[Hq, seqlen_local]`.

        Raises:
            TypeError: q, k or v is no tensor, return_lse no bool, or return_aux no AuxRequest.
            ValueError: shapes, dtypes or devices do not fit each other or the plan; on every rank, if the ranks have
                planned different masks, or differ in shapes, dtypes or options.
            NotImplementedError: no kernel runs this; the mask depends on the batch entry or the head, and was made for
                one; the score_mod is no pointwise function, or in a graph for another backend.
        """
        with_max = asks_for_max_scores(return_lse, return_aux)
        check_options("scale", scale, softcap)
        out, lse, max_scores = self.attend(
            *(q, k, v, self.meta, scale, softcap), score_mod, return_max_scores=with_max
        )
        if sinks is not None:
            check_sinks(sinks, q)
            out = out_with_sinks(out, lse, sinks, heads_first=q.ndim == 4)
            lse = lse_with_sinks(lse, sinks)
        return returned(out, lse, max_scores, return_lse=return_lse, return_aux=return_aux)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: Tensor,
        scale: float | None,
        softcap: float,
        score_mod: Callable[..., Any] | None = None,
        *,
        return_max_scores: bool = False,
    ) -> AttnOutput:
        """Attention of this rank's rows by `meta`, a tensor that says what `self.meta` says.

        Args:
            q: `[B, H, seqlen_local, D]` or `[seqlen_local, H, D]`, on the device of the mesh, or DTensors.
            k: the same with the heads of keys, of as many rows as this rank has keys.
            v: likewise; its head_dim may be another.
            meta: int64, `[numbers]`, on the CPU.
            scale: of the scores; None for `D ** -0.5`.
            softcap: of the scores; 0 for none.
            score_mod: of FlexAttention, by positions of the whole sequence.
            return_max_scores: whether `max_scores` is computed.

        Returns:
            `out`, shaped as q with v's head_dim; `lse` and `max_scores`, fp32 `[B, H, seqlen_local]` or
            `[H, seqlen_local]`.

        Raises:
            TypeError: q, k or v is no tensor.
            ValueError: shapes or devices do not fit each other or the plan.
        """
        for name, x in {"q": q, "k": k, "v": v}.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
            if x.ndim not in (3, 4) or x.ndim != q.ndim:
                raise ValueError(
                    f"`{name}` must be [B, H, seqlen_local, D] or [seqlen_local, H, D], like `q`, got "
                    f"shape {list(x.shape)}"
                )
        if self._of_unknown:
            self._refuse_several(q)
        if q.ndim == 3 and self._entries.batch > 1:
            raise ValueError(
                f"`q` must be [B, H, seqlen_local, D] for the mask of {self._entries.batch} batch entries that the "
                f"plan has, got packed tensors {list(q.shape)}, which have none"
            )
        shards, layout = None, PADDED if q.ndim == 4 else PACKED
        share: tuple[int, ...] = ()
        if are_distributed(q, k, v):
            shards = shards_of({"q": q, "k": k, "v": v}, layout, self._ranks)
            q, k, v = shards[:3]
            share = share_of(shards)
        self._check_tensors({"q": q, "k": k, "v": v})
        order = memory_order(q.stride())
        batch, nheads = (1, q.shape[1]) if q.ndim == 3 else q.shape[:2]
        if is_padded := q.ndim == 4:
            # Entries of a batch have one mask, so they are more heads.
            q, k, v = (x.permute(2, 0, 1, 3).flatten(1, 2) for x in (q, k, v))
        tensors = PlanTensors(meta, self.data)
        heads = self._heads
        if heads is not None:
            q, k, v = as_autocast(q, k, v)  # before they travel
            q, k, v = heads.share(self._divided(q, k, v, batch), tensors, batch)
            first_entry, first_head, *whole = share or (0, 0, batch, nheads)
            share = (first_entry, first_head + heads.rank * (nheads // heads.number), *whole)
        options: dict[str, Any] = {
            "softmax_scale": scale,
            "softcap": softcap,
            "return_max_scores": return_max_scores,
            "score_mod": shifted_score_mod(score_mod, *share[:2]) if share else score_mod,
            "share": share if self._entries.number > 1 else (),
        }
        if is_padded:
            options["batch_entries"] = batch
        out, *rows = context_parallel_attention(q, k, v, tensors, self._over, **options)
        if heads is not None:
            # Numbers of rows are rows of one number of each head.
            numbers = [x.T[:, :, None] for x in rows if x is not None]
            out, *found = heads.give_back([out, *numbers], tensors, batch)
            rows = [found.pop(0)[:, :, 0].T if x is not None else None for x in rows]
        if is_padded:
            out = in_memory_order(out.unflatten(1, (batch, nheads)).permute(1, 2, 0, 3), order)
            rows = [None if x is None else x.unflatten(0, (batch, nheads)) for x in rows]
        return AttnOutput(*as_dtensors(shards, layout, out, *rows))

    def _divided(self, q: Tensor, k: Tensor, v: Tensor, batch: int) -> list[Tensor]:
        """Packed q, k and v with heads that the ranks which share them divide: those of keys that the query heads of
        each rank read."""
        check_qkv(q, k, v, "[seqlen_local, nheads, head_dim]")
        number, (nheads_q, nheads_kv) = self.head_ranks, (x.shape[1] // batch for x in (q, k))
        if nheads_q % number:
            raise ValueError(
                f"`q` must have heads that the {number} ranks which share them divide (`head_ranks` of "
                f"ContextParallelOptions, or the heads that its `cost` says), got {nheads_q}"
            )
        group, heads = nheads_q // nheads_kv, nheads_q // number
        read = [x for i in range(number) for x in heads_that_are_read(i * heads, heads, group)]
        if read == [*range(nheads_kv)]:
            return [q, k, v]
        by_entry = (x.unflatten(1, (batch, nheads_kv)) for x in (k, v))
        return [
            q,
            *(
                torch.cat([x.narrow(2, head, 1) for head in read], 2).flatten(1, 2)
                for x in by_entry
            ),
        ]

    def _check_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Raises where q, k or v are elsewhere, or have other numbers of tokens or batch entries."""
        batch = tensors["q"].shape[0]
        for name, x in tensors.items():
            if x.device != self.device:
                raise ValueError(
                    f"`{name}` must be on the device of the mesh, {self.device}, got {x.device}"
                )
            tokens: SpreadTokens = self
            what = "tokens"
            if name != "q" and self.is_cross:
                tokens, what = self.keys, "keys"
            length, dim = tokens.seqlen_local, 2 if x.ndim == 4 else 0
            check_length(name, x, dim, length, "of this rank", what)
            if x.ndim == 4 and x.shape[0] != batch:
                raise ValueError(
                    f"`{name}` must have the batch size of `q`, {batch}, got {x.shape[0]}"
                )
