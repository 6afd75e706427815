"""DTensors as q, k and v: placements are checked, each rank attends with its local tensors,
and what comes out is wrapped.

Attention is the same for every head and every entry of a batch, so these may be sharded, on any dimensions of a mesh,
and nothing is communicated. The tokens of a sequence see each other: they are spread by a plan of context parallelism
alone, whose ranks are one dimension of the mesh. Keys and values may be replicated where heads of queries are sharded:
each rank takes the heads that its queries read, and its gradients of keys and values are summands, `Partial()`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from magi_compile._kept import Made, Memo
from magi_compile.masks.block_mask import reached_by
from magi_compile.ops.validation import shown

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.attention.flex_attention import BlockMask


class Layout(NamedTuple):
    """The meaning of each dimension of q, k and v, and the dimension of the log-sum-exp that it is."""

    entries: int | None
    heads: int
    tokens: int
    in_lse: tuple[int, ...]


PADDED = Layout(entries=0, heads=1, tokens=2, in_lse=(0, 1, 2))  # [B, H, S, D], lse [B, H, S]
PACKED = Layout(entries=None, heads=1, tokens=0, in_lse=(1, 0))  # [S, H, D], lse [H, S]


class Shards(NamedTuple):
    """The part of a call that one rank computes."""

    q: Tensor
    k: Tensor
    v: Tensor
    mesh: DeviceMesh
    placements: tuple[Any, ...]  # of q and of the output
    entries: tuple[int, int] | None  # the first of this rank and how many, where they are sharded
    heads: tuple[int, int] | None  # the same of the heads of q
    whole: tuple[int, int]  # batch entries and heads of the whole q


def are_distributed(q: Any, k: Any, v: Any) -> bool:
    """True if any of them is a DTensor."""
    if type(q) is Tensor and type(k) is Tensor and type(v) is Tensor:
        return False
    if not torch.compiler.is_dynamo_compiling() and "torch.distributed.tensor" not in sys.modules:
        return False
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(q, DTensor) or isinstance(k, DTensor) or isinstance(v, DTensor)


def shards_of(
    tensors: Mapping[str, Any], layout: Layout, tokens_over: list[int] | None = None
) -> Shards:
    """The local tensors of q, k and v, in this order and by the names that errors have for them, and where they lie in
    the whole ones. `tokens_over` are the ranks that share the tokens by a plan; None where every rank has all tokens.

    Raises TypeError if not all are DTensors, and ValueError if meshes or placements do not fit; the message says what
    to redistribute.
    """
    from torch.distributed.tensor import DTensor, Partial

    q_name, k_name, _ = tensors
    q, k, v = tensors.values()
    for name, x in tensors.items():
        if not isinstance(x, DTensor):
            raise TypeError(
                f"`{name}` must be a DTensor, as others of {', '.join(tensors)} are, got {type(x).__name__}; wrap it "
                "with DTensor.from_local or distribute_tensor"
            )
    mesh = q.device_mesh
    for name, x in tensors.items():
        if x.device_mesh != mesh:
            raise ValueError(
                f"`{name}` must be on the mesh of `{q_name}`, {mesh}, got {x.device_mesh}"
            )
        if x.ndim != len(layout.in_lse) + 1:
            raise ValueError(
                f"`{name}` must have {len(layout.in_lse) + 1} dimensions, got shape {shown(x.shape)}"
            )
    num_q, num_k = q.shape[layout.heads], k.shape[layout.heads]
    if num_k == 0 or num_q % num_k:
        raise ValueError(
            f"`{q_name}` must have a multiple of the heads of `{k_name}`, {num_k}, got {num_q} heads"
        )
    for dim in range(mesh.ndim):
        _check_query(tensors, layout, dim, tokens_over)
        _check_keys(tensors, layout, dim)
    # Of which heads, and of which entries of the batch, this rank has the share.
    q_heads = _share(q, layout.heads)
    k_heads = _share(k, layout.heads)
    entries = None if layout.entries is None else _share(q, layout.entries)
    gradients = [
        of_k if of_k == of_q else Partial()
        for of_q, of_k in zip(q.placements, k.placements, strict=True)
    ]
    local_q = q.to_local()
    local_k, local_v = (x.to_local(grad_placements=gradients) for x in (k, v))
    if q_heads is not None:
        first = 0 if k_heads is None else k_heads[0]
        local_k, local_v = (
            _heads_that_are_read(x, layout.heads, q_heads, num_q // num_k, first)
            for x in (local_k, local_v)
        )
    whole = 1 if layout.entries is None else q.shape[layout.entries], num_q
    return Shards(local_q, local_k, local_v, mesh, q.placements, entries, q_heads, whole)


def as_dtensors(
    shards: Shards | None, layout: Layout, out: Tensor, *rows: Tensor | None
) -> tuple[Any, ...]:
    """The output, and numbers of rows as the log-sum-exp and the largest scores, as DTensors that are placed like q;
    None stays None. Without shards all stay as they are."""
    if shards is None:
        return out, *rows
    from torch.distributed.tensor import DTensor, Shard

    mesh, placements = shards.mesh, shards.placements
    of_rows = [Shard(layout.in_lse[p.dim]) if isinstance(p, Shard) else p for p in placements]
    made: list[Any] = [DTensor.from_local(out, mesh, placements, run_check=False)]
    for x in rows:
        made.append(x if x is None else DTensor.from_local(x, mesh, of_rows, run_check=False))
    return tuple(made)


# Placements


def _is_over(mesh: DeviceMesh, dim: int, ranks: list[int] | None) -> bool:
    """True if a dimension of the mesh has these ranks, which are several. Equal meshes may have groups of other names,
    and a tensor computed from a DTensor may be on an equal mesh."""
    if ranks is None or len(ranks) == 1:
        return False
    return torch.distributed.get_process_group_ranks(mesh.get_group(dim)) == ranks


def _is_shard(placement: Any, dim: int | None) -> bool:
    """True if it is `Shard(dim)`; other classes shard in another order."""
    return dim is not None and placement.is_shard(dim)


def _check_query(
    tensors: Mapping[str, Any], layout: Layout, dim: int, tokens_over: list[int] | None
) -> None:
    name = next(iter(tensors))
    x = tensors[name]
    placement, ranks = x.placements[dim], x.device_mesh.size(dim)
    if _is_over(x.device_mesh, dim, tokens_over):
        if not _is_shard(placement, layout.tokens):
            raise ValueError(
                f"`{name}` must be Shard({layout.tokens}), tokens in the order of the plan, on "
                f"{_of_mesh(x, dim)}, the dimension of the "
                f"plan, got {_said(placement)}; wrap the result of SequencePlan.shard with DTensor.from_local"
            )
        return
    if _is_shard(placement, layout.tokens):
        if ranks == 1:
            return
        where = (
            "outside of context parallelism"
            if tokens_over is None
            else "where the ranks are not those of the plan"
        )
        raise ValueError(
            f"`{name}` must have all tokens on every rank {where}, got {_said(placement)} on {_of_mesh(x, dim)}; "
            f"{_redistribute(name, x, dim)}, or shard tokens by a plan: "
            "magi_compile.dtensor.context_parallel or SequencePlan.attention"
        )
    if _is_shard(placement, layout.heads):
        _check_divides(name, x, layout.heads, "heads")
    elif layout.entries is not None and _is_shard(placement, layout.entries):
        _check_divides(name, x, layout.entries, "entries of the batch")
    elif not placement.is_replicate():
        entries = "" if layout.entries is None else f", Shard({layout.entries}), entries,"
        raise ValueError(
            f"`{name}` must be Replicate(){entries} or Shard({layout.heads}), heads, on {_of_mesh(x, dim)}, got "
            f"{_said(placement)}; {_redistribute(name, x, dim)}"
        )


def _check_keys(tensors: Mapping[str, Any], layout: Layout, dim: int) -> None:
    """Keys and values are where their queries are; or replicated, where the heads of queries are sharded."""
    (q_name, q), *others = tensors.items()
    k_name, k = others[0]
    wanted = q.placements[dim]
    for name, x in others:
        placement = x.placements[dim]
        if placement != k.placements[dim]:
            raise ValueError(
                f"`{name}` must have the placement of `{k_name}` on {_of_mesh(x, dim)}, {_said(k.placements[dim])}, "
                f"got {_said(placement)}; {_redistribute(name, x, dim, k.placements[dim])}"
            )
        if placement == wanted:
            if _is_shard(placement, layout.heads):
                _check_divides(name, x, layout.heads, "heads")
        elif not (placement.is_replicate() and _is_shard(wanted, layout.heads)):
            also = " or Replicate()" if _is_shard(wanted, layout.heads) else ""
            raise ValueError(
                f"`{name}` must be {_said(wanted)}, as `{q_name}` is,{also} on {_of_mesh(x, dim)}, got "
                f"{_said(placement)}; {_redistribute(name, x, dim, wanted)}"
            )
        # Heads are cut by the dimensions of the mesh from the left: keys by the first ones of those that cut queries.
        elif any(_is_shard(p, layout.heads) for p in x.placements[dim + 1 :]):
            raise ValueError(
                f"`{name}` must be Shard({layout.heads}), heads, on {_of_mesh(x, dim)} too, since it is that on a "
                f"later dimension, got {_said(placement)}; {_redistribute(name, x, dim, wanted)}"
            )


def _check_divides(name: str, x: Any, dim: int, what: str) -> None:
    ranks = 1
    for i, placement in enumerate(x.placements):
        if _is_shard(placement, dim):
            ranks *= x.device_mesh.size(i)
    if x.shape[dim] % ranks:
        placements = ["Replicate()" if _is_shard(p, dim) else _said(p) for p in x.placements]
        raise ValueError(
            f"`{name}` must have a multiple of {ranks} {what}, as many as ranks share them, got {shown(x.shape[dim])}; "
            f"redistribute it, {name}.redistribute(placements=[{', '.join(placements)}])"
        )


def _said(placement: Any) -> str:
    if placement.is_shard():
        return f"Shard({placement.dim})"
    if placement.is_replicate():
        return "Replicate()"
    return "Partial()" if placement.is_partial() else str(placement)


def _redistribute(name: str, x: Any, dim: int, placement: Any = None) -> str:
    placements = [_said(p) for p in x.placements]
    placements[dim] = "Replicate()" if placement is None else _said(placement)
    return f"redistribute it, {name}.redistribute(placements=[{', '.join(placements)}])"


def _of_mesh(x: Any, dim: int) -> str:
    names = x.device_mesh.mesh_dim_names
    return f"dimension {dim if names is None else repr(names[dim])} of its mesh"


# Shares


def _share(x: Any, dim: int) -> tuple[int, int] | None:
    """The part of dimension `dim` that this rank has, first and number; None where it is not sharded.
    Parts are equal."""
    mesh, first, number, is_sharded = x.device_mesh, 0, x.shape[dim], False
    for i, placement in enumerate(x.placements):
        if _is_shard(placement, dim):
            number = number // mesh.size(i)
            first += mesh.get_local_rank(i) * number
            is_sharded = True
    return (first, number) if is_sharded else None


def heads_that_are_read(first: int, number: int, group: int) -> list[int]:
    """The heads of keys for `number` heads of queries from `first` on, where `group` in a row read one: one for each
    part of a group, some of them twice where groups are cut."""
    step = math.gcd(number, group)  # so many heads in a row read one, on every rank
    return [head // group for head in range(first, first + number, step)]


def _heads_that_are_read(
    x: Tensor, dim: int, q_heads: tuple[int, int], group: int, first_here: int
) -> Tensor:
    """The heads of keys or values for the heads `q_heads` of queries, where `group` in a row read one and `x` begins
    with head `first_here`: itself, or fewer, or, where groups are cut, one for each part of a group, some of them
    twice."""
    wanted = [head - first_here for head in heads_that_are_read(*q_heads, group)]
    if wanted == list(range(x.shape[dim])):
        return x
    if wanted == list(range(wanted[0], wanted[0] + len(wanted))):
        return x.narrow(dim, wanted[0], len(wanted))
    return torch.cat([x.narrow(dim, head, 1) for head in wanted], dim)


# Masks and score_mods see the numbers of heads and entries in the whole tensors


def share_of(shards: Shards) -> tuple[int, ...]:
    """The numbers of the first batch entry and the first head of a rank that has a share of them, and how many there
    are of both; else nothing."""
    if shards.heads is None and shards.entries is None:
        return ()
    return *firsts_of(shards), *shards.whole


def shifted_score_mod(score_mod: Any, first_entry: int, first_head: int) -> Any:
    """`score_mod` for batch entries and heads from these on."""
    if not callable(score_mod) or (first_entry, first_head) == (0, 0):
        return score_mod

    def shifted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score_mod(score, b + first_entry, h + first_head, q, kv)

    return shifted


def block_mask_of(block_mask: BlockMask | None, shards: Shards) -> BlockMask | None:
    """The BlockMask of this rank's heads and entries; the same object for the same one, in eager code."""
    if block_mask is None or (shards.heads is None and shards.entries is None):
        return block_mask
    if torch.compiler.is_dynamo_compiling():
        return _part_of(block_mask, shards)

    def make() -> Made:
        is_unchanged = reached_by(block_mask).is_unchanged
        lists = [x for x in (getattr(block_mask, name) for name in _LISTS) if x is not None]
        return Made(_part_of(block_mask, shards), lists, is_unchanged)

    key, device = (shards.entries, shards.heads), block_mask.kv_num_blocks.device
    return _parts.get((block_mask,), key, make, device, serves_capture=True)


_parts: Memo[Any] = Memo(256, lambda part: ())

_LISTS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)


def _part_of(block_mask: BlockMask, shards: Shards) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    mask_mod, (first_entry, first_head) = block_mask.mask_mod, firsts_of(shards)

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b + first_entry, h + first_head, q, kv)

    lists = {}
    for name in _LISTS:
        x = getattr(block_mask, name)
        for dim, share in ((0, shards.entries), (1, shards.heads)):
            if x is not None and share is not None and x.shape[dim] > 1:
                x = x.narrow(dim, *share)
        lists[name] = x
    return BlockMask(
        seq_lengths=block_mask.seq_lengths,
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=shifted,
        **lists,
    )


def firsts_of(shards: Shards) -> tuple[int, int]:
    """The numbers of the first batch entry and the first head of a rank."""
    entries, heads = shards.entries, shards.heads
    return 0 if entries is None else entries[0], 0 if heads is None else heads[0]
