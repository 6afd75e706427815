"""Tensors over a whole sequence and the tokens of one rank: of which sequence each is, and how it is cut."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from magi_compile.dtensor.sequence.sequence_plan import SequencePlan
from magi_compile.dtensor.sequence.spread_tokens import SpreadTokens, check_padding
from magi_compile.ops.validation import check_list


def require_together(plans: Sequence[SequencePlan]) -> None:
    """Plans hold the same tokens, or one holds as its keys what another one holds."""
    reached, others = [plans[0], plans[0].keys], list(plans[1:])
    while others:
        reachable = [x for x in others if _among(x, reached) or _among(x.keys, reached)]
        if not reachable:
            raise ValueError(
                "`mask` must have plans that hold the same tokens, got others; make them together: plan(masks=[...], "
                "mesh=mesh), or with `keys`, where the keys of one are the tokens of another"
            )
        others = [x for x in others if x not in reachable]
        reached += [tokens for x in reachable for tokens in (x, x.keys)]


def _among(tokens: SpreadTokens, others: Sequence[SpreadTokens]) -> bool:
    """True if one of the others has the same tokens."""
    return any(tokens is x or tokens.has_the_tokens_of(x) for x in others)


def sequences_of(plans: Sequence[SequencePlan]) -> list[SpreadTokens]:
    """Queries and keys of all plans, each sequence once."""
    found: list[SpreadTokens] = []
    for planned in plans:
        for tokens in (planned, planned.keys):
            if not _among(tokens, found):
                found.append(tokens)
    return found


def owner_of(
    name: str, x: Tensor, dim: int, sequences: Sequence[SpreadTokens], *, is_local: bool = False
) -> SpreadTokens:
    """The sequence of which `x` has the tokens along `dim`, by its length, of the whole or of one rank."""
    if len(sequences) == 1 or not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
        return sequences[0]  # which says what is wrong
    lengths = [s.seqlen_local if is_local else s.total for s in sequences]
    fitting = [s for s, n in zip(sequences, lengths, strict=True) if n == x.shape[dim]]
    if not fitting:
        raise ValueError(
            f"`{name}` must have as many tokens in dimension {dim} as queries or keys, "
            f"{' or '.join(map(str, sorted(set(lengths))))}, got {x.shape[dim]}"
        )
    if len(fitting) > 1:
        call = "unshard" if is_local else "shard"
        raise ValueError(
            f"`{name}` must have a length that says whether it is of queries or of keys, got {x.shape[dim]} in "
            f"dimension {dim}, which both have; take SequencePlan.{call}(x, dim) for queries and "
            f"SequencePlan.keys.{call}(x, dim) for keys in its place"
        )
    return fitting[0]


def local_shards(
    plans: Sequence[SequencePlan],
    tensors: Sequence[Tensor],
    dims: Sequence[int],
    padding: Sequence[float] | None,
    padding_name: str,
) -> list[Tensor]:
    """This rank's tokens of each of `buffers`, along `dims`;
    errors about `padding` call it by the name that the caller has for it."""
    if padding is not None:
        check_list(padding_name, padding)
    sequences = sequences_of(plans)
    owners = [
        owner_of(f"buffers[{number}]", x, dim, sequences)
        for number, (x, dim) in enumerate(zip(tensors, dims, strict=True))
    ]
    for of in owners:
        if padding is None and of.has_padding:
            raise ValueError(
                f"`{padding_name}` must say what padding holds in each of `buffers` (the ignore_index for labels), "
                f"because {of.total} tokens are padded to {of.seqlen_local} on each of {of.cp_size} ranks"
            )
    if padding is not None and len(padding) != len(tensors):
        raise ValueError(
            f"`{padding_name}` must have an entry for each of the {len(tensors)} buffers, got {len(padding)}"
        )
    for number, value in enumerate(padding or []):
        check_padding(f"{padding_name}[{number}]", value, tensors[number].dtype)
    shards = []
    for number, (of, x, dim) in enumerate(zip(owners, tensors, dims, strict=True)):
        try:
            shards.append(of.shard(x, dim, padding=padding[number] if padding else 0))
        except ValueError as error:
            raise ValueError(str(error).replace("`x`", f"`buffers[{number}]`")) from error
    return shards
