"""One sequence over ranks: which rank has which of its tokens,
and how tensors over it are spread and put together again.

Tokens of self-attention are queries and keys; those of cross attention are two sequences, each spread by itself.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile.dtensor.on_device import to_device
from magi_compile.dtensor.planning.chunks import Placement
from magi_compile.masks.arguments import check_flag


class SpreadTokens:
    """The spread of the tokens of one sequence over ranks: of the queries in `SequencePlan`, of the keys in
    `SequencePlan.keys`.

    Args:
        where: which rank of the plan holds which rows.
        rank: this rank among those of `group`.
        group: the ranks.
        device: of the mesh.

    Attributes:
        total: tokens of the sequence.
        seqlen_local: tokens of a rank, the same on all: `total / cp_size`, or more with padding.
        cp_size: number of ranks.
        rank: this rank's number among them.
        placement: which rank holds which rows.
        of_groups: which group of ranks that share heads holds which rows; where none do, that is `placement`.
    """

    def __init__(self, where: Placement, rank: int, group: dist.ProcessGroup, device: torch.device):
        self.of_groups, share = where, group.size() // where.cp_size
        if share > 1:
            where = where.parted(share)
        self.total, self.seqlen_local = where.total, where.seqlen_local
        self.cp_size, self.rank = where.cp_size, rank
        self.has_padding = where.total_padded > where.total
        positions = where.positions(rank)
        is_padding = positions >= where.total
        self._on_host = (positions.masked_fill(is_padding, 0), is_padding)
        self.positions, self.is_padding = (to_device(x, device) for x in self._on_host)
        self.device = device
        self.group_name = group.group_name
        self.placement, self._group = where, group

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(total={self.total}, seqlen_local={self.seqlen_local}, rank={self.rank} of "
            f"{self.cp_size}, chunk_size={self.placement.chunk_size}, device='{self.device}')"
        )

    def __copy__(self) -> Any:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled: it has a process group. A worker makes a HostPlan, "
            "which can be: plan(mask, ranks=(cp_size, rank)), or plan_ahead with `ranks`; `HostPlan.on(mesh)` is the "
            "plan in the process that has the group"
        )

    def has_the_tokens_of(self, other: SpreadTokens) -> bool:
        """True if every rank holds the same tokens by both, in the same order."""
        if not isinstance(other, SpreadTokens):
            raise TypeError(
                f"`other` must be a SequencePlan or its keys, got {type(other).__name__}"
            )
        here, there = self.placement, other.placement
        return (here.total, here.chunk_size, self.group_name) == (
            there.total,
            there.chunk_size,
            other.group_name,
        ) and torch.equal(here.chunks, there.chunks)

    def placement_on(self, number: int, share: int) -> Placement:
        """The placement on so many groups of `share` ranks each; that of the ranks themselves if they are others."""
        where = self.placement
        if share == 1 or where.cp_size != number * share:
            return where
        if self.of_groups.cp_size == number:
            return self.of_groups
        return Placement(where.total, where.chunk_size, where.chunks.view(number, -1))

    def permutation(self, restore: bool = False) -> Tensor:
        """The order of the tokens, in the form of PyTorch's load balancers: after it,
        rank r holds the r-th of equal parts.

        The plan itself serves where PyTorch asks for a `load_balancer`.

        Args:
            restore: whether to give the inverse, which takes tokens of all ranks to their order in the sequence.

        Returns:
            int64 `[1, total]`, on the device of the mesh.

        Raises:
            ValueError: the sequence is padded, which that form cannot say.
        """
        check_flag("restore", restore)
        if self.has_padding:
            raise ValueError(
                f"a `permutation` needs a plan without padding, but {self.total} tokens are padded to "
                f"{self.seqlen_local} on each of {self.cp_size} ranks"
            )
        where = self.placement.inverse_positions() if restore else self.placement.positions()
        return to_device(where[None], self.device)

    # What a balancer has it under, in PyTorch and in torchtitan.
    _generate_indices = generate_permutation = permutation

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
        check_length("x", x, dim, self.total, "of the whole sequence")
        padding = check_padding("padding", padding, x.dtype)
        sizes = [1] * x.ndim
        sizes[dim] = self.seqlen_local
        if not self.total:  # no row to take in place of padding
            x = x.new_zeros([1 if i == dim % x.ndim else n for i, n in enumerate(x.shape)])
        # Tokens of a loader are on the host, which need not wait for the GPU then.
        lists = self._on_host if x.device.type == "cpu" else (self.positions, self.is_padding)
        positions, is_padding = lists
        local = x.index_select(dim, positions.to(x.device))
        if self.has_padding:
            local = local.masked_fill(is_padding.to(x.device).view(sizes), padding)
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
        check_length("x", x, dim, self.seqlen_local, "of this rank")
        with torch.no_grad():
            local = x.detach().movedim(dim, 0).contiguous()
            parts = [torch.empty_like(local) for _ in range(self.cp_size)]
            dist.all_gather(parts, local, self._group)
            order = to_device(self.placement.inverse_positions()[: self.total], x.device)
            return torch.cat(parts).index_select(0, order).movedim(0, dim)

    def roll(self, x: Tensor, shifts: int, dim: int) -> Tensor:
        """This rank's part of `torch.roll` along the whole sequence; all ranks call it together, with equal `shifts`.

        For multi-token prediction: `p.roll(x, -n, dim)` gives each token the entry of the token n places later in the
        sequence, whichever rank has that. As with `torch.roll`, the first tokens follow the last one.

        Args:
            x: any dtype, on a device that the group reaches; `seqlen_local` entries along `dim`.
            shifts: the number of places by which entries move on in the sequence; negative for back.
            dim: the dimension of the sequence.

        Returns:
            A new tensor like `x`; entries of padding are 0. Differentiable.

        Raises:
            TypeError: `shifts` is no int.
            ValueError: `x` has another length.
        """
        from magi_compile.dtensor.sequence import roll as _roll  # noqa: F401  the op exists once it is imported

        check_length("x", x, dim, self.seqlen_local, "of this rank")
        if not isinstance(shifts, int) or isinstance(shifts, bool):
            raise TypeError(f"`shifts` must be an int, got {shifts!r}")
        if not -(1 << 63) <= shifts < 1 << 63:
            raise ValueError(f"`shifts` must fit in 64 bits, got {shifts}")
        where = self.placement
        sizes = (where.chunk_size, where.total, shifts, self.group_name)
        return torch.ops.magi.cp_roll(x.movedim(dim, 0), where.chunks, *sizes).movedim(0, dim)

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

        Call it on the whole sequence. Shifting this rank's tokens instead would take the next token of the rank, which
        is wrong.

        Args:
            tokens: integers over the whole sequence, the same on every rank; `total` entries along `dim`. Entries may
                be `ignore_index` already.
            dim: the dimension of the sequence.
            documents: the document number of each token, broadcastable to `tokens`. The last token of each document
                then has the label `ignore_index`, as the last token of the sequence has.
            is_shifted: whether `tokens` already are the labels.
            ignore_index: the label of tokens that predict nothing, padding included; by default that of
                `cross_entropy`.

        Returns:
            The dtype of `tokens`, with `seqlen_local` entries along `dim`.

        Raises:
            ValueError: `tokens` are no integers, or `tokens` or `documents` do not fit.
        """
        check_length("tokens", tokens, dim, self.total, "of the whole sequence")
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise ValueError(f"`tokens` must be integers, got dtype {tokens.dtype}")
        check_flag("is_shifted", is_shifted)
        if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
            raise TypeError(f"`ignore_index` must be an int, got {ignore_index!r}")
        limits = torch.iinfo(tokens.dtype)
        if not limits.min <= ignore_index <= limits.max:
            raise ValueError(
                f"`ignore_index` must fit in the dtype of `tokens`, {tokens.dtype}, got {ignore_index}"
            )
        if not is_shifted:
            tokens = _next(tokens, dim, ignore_index)
        if documents is not None:
            dim = dim % tokens.ndim - tokens.ndim
            check_length("documents", documents, dim, self.total, "of the whole sequence")
            differs = documents.diff(dim=dim) != 0
            is_last = torch.ones_like(documents, dtype=torch.bool)
            is_last.narrow(dim, 0, differs.shape[dim]).copy_(differs)
            tokens = tokens.masked_fill(is_last.to(tokens.device), ignore_index)
        return self.shard(tokens, dim, padding=ignore_index)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, for example of losses to print. All ranks call it together.
        Not differentiable."""
        if not isinstance(x, Tensor):
            raise TypeError(f"`x` must be a tensor, got {type(x).__name__}")
        with torch.no_grad():
            x = x.detach().clone()
            dist.all_reduce(x, group=self._group)
            return x


def check_length(
    name: str, x: Tensor, dim: int, length: int, whose: str, what: str = "tokens"
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"`dim` must be an int for `{name}`, got {dim!r}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"`dim` must be in [{-x.ndim}, {x.ndim}) for `{name}`, got {dim}")
    if x.shape[dim] != length:
        raise ValueError(
            f"`{name}` must have the {length} {what} {whose} in dimension {dim}, got {x.shape[dim]}"
        )


def check_padding(name: str, given: Any, dtype: torch.dtype) -> float:
    """The value of padding for a tensor of `dtype`, which integers hold exactly and others may round."""
    if not isinstance(given, numbers.Real):
        raise TypeError(f"`{name}` must be a number, got {given!r}")
    value = int(given) if isinstance(given, numbers.Integral) else float(given)
    if dtype == torch.bool:
        fits = value in (0, 1)
    elif dtype.is_floating_point or dtype.is_complex:
        is_finite = isinstance(value, int) or math.isfinite(value)
        fits = not is_finite or abs(value) <= torch.finfo(dtype).max
        value = float(value) if fits else value  # PyTorch takes no int of more than 64 bits
    else:
        limits = torch.iinfo(dtype)
        fits = limits.min <= value <= limits.max and value == int(value)
        fits = fits and not isinstance(given, bool)
    if not fits:
        raise ValueError(f"`{name}` must fit in {dtype}, got {given}")
    return value


def _next(x: Tensor, dim: int, last: int) -> Tensor:
    """The next entry along `dim`, and `last` behind the end."""
    sizes = list(x.shape)
    sizes[dim] = 1
    return torch.cat([x, x.new_full(sizes, last)], dim).narrow(dim, 1, x.shape[dim])
