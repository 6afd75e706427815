"""The explanation of a plan: balance, the keys that travel, stages, and the time that the cost model predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from magi_compile.dtensor.planning.comm_plan import RankRows, StageLoads
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.stages import backward_seconds, early_seconds, forward_seconds
from magi_compile.masks.bits import FIRST_BITS

if TYPE_CHECKING:
    from magi_compile.dtensor.planning.comm_plan import Stage
    from magi_compile.dtensor.planning.rank_plan import RankPlan


@dataclass(frozen=True)
class PlanExplanation:
    """The work and the traffic that a plan gives to all ranks; print it. Where ranks share heads, a rank stands for a
    group of `head_ranks`, and a row for one of a rank's share of the heads."""

    rank: int  # the number of this rank
    total: int  # tokens of the sequence
    seqlen_local: int  # tokens of each rank, padding included
    chunk_size: int  # tokens that stay together
    total_keys: int  # as many as tokens in self-attention
    keys_local: int  # of each rank, padding included
    # Visible (query, key) pairs of each rank's queries, of blocks of bits all pairs; where heads have masks of their
    # own, the mean of these, and where batch entries have, the sum. And those of them whose key is on the same rank.
    area: tuple[int, ...]
    local_area: tuple[int, ...]
    # Key rows of others of each rank, in a forward pass and again in a backward pass: of all batch entries, or where
    # these have masks of their own, of one
    received_rows: tuple[int, ...]
    sent_rows: tuple[int, ...]  # key rows of each rank, once for each rank that receives them
    hosts: tuple[int, ...] | None  # the host of each rank; None where all are on one
    relayed: tuple[
        bool, bool
    ]  # rows cross hosts once for each host, and are handed on there, forward and backward
    # Key rows of all ranks that cross hosts in a forward and in a backward pass; gradients of as many come back. And
    # those of either pass if every rank got them from where they are held.
    crossing_rows: tuple[int, int]
    crossing_rows_apart: int
    batch: int  # batch entries with masks of their own; 1 where all have the same
    mask: str  # of this rank, in words: slices, blocks of bits, and whose masks they are
    forward: str  # how a forward pass goes on, in words
    backward: str
    # Of a pass of the slowest rank, by the cost model, with the exchange of heads.
    forward_seconds: float
    backward_seconds: float
    forward_efficiency: float  # what compute alone takes in perfect balance, over `forward_seconds`
    backward_efficiency: float
    head_ranks: int  # that share the heads of their tokens; 1 where none does
    # Of a pass, to exchange them; 0 where none does, or the cost model does not know how many heads there are.
    exchange_seconds: float

    @property
    def imbalance(self) -> float:
        """The work of the heaviest rank over the mean, 1.0 at best."""
        total = sum(self.area)
        return max(self.area) * len(self.area) / total if total else 1.0

    @property
    def gathered_rows(self) -> int:
        """The rows that each rank receives in an all-gather."""
        return (len(self.area) - 1) * self.keys_local * self.batch

    def __str__(self) -> str:
        size, gathered = len(self.area), max(self.gathered_rows, 1)
        mean = sum(self.received_rows) / size
        local = sum(self.local_area) / max(sum(self.area), 1)
        times = [
            f"{seconds * 1e3:.3f} ms, {efficiency:.0%} of compute alone in perfect balance"
            for seconds, efficiency in (
                (self.forward_seconds, self.forward_efficiency),
                (self.backward_seconds, self.backward_efficiency),
            )
        ]
        keys = f"keys      {self.total_keys:,}, {self.keys_local:,} each"
        is_cross = (self.total_keys, self.keys_local) != (self.total, self.seqlen_local)
        return "\n".join(
            [
                f"tokens    {self.total:,} over {self._ranks_in_words()}, in chunks of {self.chunk_size:,}",
                *([keys] if is_cross else []),
                f"mask      {self.mask}",
                f"area      {sum(self.area):,} pairs, {local:.0%} of them with keys of the same rank",
                f"balance   the heaviest rank has {self.imbalance:.3f} times the mean",
                f"receives  rows of keys: {mean:,.0f} a rank in the mean, at most {max(self.received_rows):,}, "
                f"rank {self.rank} {self.received_rows[self.rank]:,}; an all-gather "
                f"{self.gathered_rows:,} ({mean / gathered:.1%})",
                f"sends     at most {max(self.sent_rows):,} rows, rank {self.rank} {self.sent_rows[self.rank]:,}",
                *self._hosts_in_words(),
                *self._exchange_in_words(),
                f"forward   {self.forward}",
                f"          predicted: {times[0]}",
                f"backward  {self.backward}",
                f"          predicted: {times[1]}",
            ]
        )

    def _ranks_in_words(self) -> str:
        size, rows = len(self.area), f"{self.seqlen_local:,}"
        if self.head_ranks == 1:
            return f"{size} ranks, {rows} each"
        words = f"{size} groups of {self.head_ranks} ranks that share heads, {rows} a group"
        return f"{words} (below, a rank is a group, and a row is of a rank's heads)"

    def _exchange_in_words(self) -> list[str]:
        if self.head_ranks == 1:
            return []
        seconds = f"{self.exchange_seconds * 1e3:.3f} ms a pass, in what is predicted below"
        if not self.exchange_seconds:
            seconds = (
                "which the cost model leaves out, because it does not say how many heads there are"
            )
        return [f"heads     q, k, v and out are exchanged in a group: {seconds}"]

    def _hosts_in_words(self) -> list[str]:
        if self.hosts is None:
            return []
        apart, words = self.crossing_rows_apart, []
        for name, is_relayed, rows in zip(
            ("forward", "backward"), self.relayed, self.crossing_rows, strict=True
        ):
            how = "one for each rank that needs it"
            if is_relayed:
                how = f"one for each host, which hands it on; one for each rank would be {apart:,}"
                how += f" ({rows / max(apart, 1):.1%} of these)"
            words.append(f"          {name} {rows:,} rows of keys cross, {how}")
        return [f"hosts     {len({*self.hosts})}", *words]


def explain_plan(plan: RankPlan, cost: CostModel) -> PlanExplanation:
    """Explains `plan` for all ranks, by the rates `cost` of all heads. Raises TypeError if `cost` is no CostModel."""
    if not isinstance(cost, CostModel):
        raise TypeError(f"`cost` must be a CostModel or None, got {type(cost).__name__}")
    where, share = plan.dispatch, plan.head_ranks
    exchange = cost.exchange_seconds(where.seqlen_local / share, share)
    cost = cost.of_share(share)
    host = None if plan.hosts is None else torch.tensor(plan.hosts, device="cpu")
    loads = StageLoads.of(RankRows.of(plan.moving), host)
    ways = [loads.relayed or loads if is_relayed else loads for is_relayed in plan.relayed]
    apart, *crossing = (0 if x.hops is None else x.hops[0].crossing for x in (loads, *ways))
    degrees = [_degree_of(stages) for stages in (plan.forward, plan.backward)]
    if plan.forward_is_early:
        forward = early_seconds(ways[0], cost)
    else:
        forward = forward_seconds(ways[0], degrees[0], cost)
    backward = backward_seconds(ways[1], degrees[1], cost)
    forward, backward = forward + exchange, backward + exchange
    ideal = loads.area.double().mean().item() * cost.seconds_per_area
    of_ranks = (loads.area, loads.local_area, loads.recv_rows, loads.send_rows)
    area, local, received, sent = (tuple(x.tolist()) for x in of_ranks)
    early = "one call, which begins with a rank's own keys while the others travel"
    return PlanExplanation(
        rank=plan.rank,
        total=where.total,
        seqlen_local=where.seqlen_local,
        chunk_size=where.chunk_size,
        total_keys=where.keys.total,
        keys_local=where.keys.seqlen_local,
        area=area,
        local_area=local,
        received_rows=received,
        sent_rows=sent,
        hosts=plan.hosts,
        relayed=plan.relayed,
        crossing_rows=(crossing[0], crossing[1]),
        crossing_rows_apart=apart,
        batch=plan.entries.batch,
        mask=_mask_in_words(plan),
        forward=early if plan.forward_is_early else _in_words(plan.forward),
        backward=_in_words(plan.backward),
        forward_seconds=forward,
        backward_seconds=backward,
        forward_efficiency=ideal / forward if ideal else 1.0,
        backward_efficiency=ideal * cost.backward_area_factor / backward if ideal else 1.0,
        head_ranks=share,
        exchange_seconds=exchange,
    )


#: Of plans that are kept: the rates, and the seconds of a forward and a backward pass by these.
_predicted: WeakKeyDictionary[RankPlan, tuple[CostModel, float]] = WeakKeyDictionary()


def predicted_seconds(plan: RankPlan, cost: CostModel) -> float:
    """A forward and a backward pass of the slowest rank, by the rates of all heads; the same on all ranks."""
    found = _predicted.get(plan)
    if found is None or found[0] != cost:
        told = explain_plan(plan, cost)
        found = _predicted[plan] = cost, told.forward_seconds + told.backward_seconds
    return found[1]


def _degree_of(stages: list[Stage]) -> int:
    """Remote stages; 0 for one call over all keys. Where nothing moves there is none,
    and the cost model calls that 1."""
    return 0 if stages[0].transfer is not None else max(len(stages) - 1, 1)


def _mask_in_words(plan: RankPlan) -> str:
    types = torch.cat([stage.slices.mask_types for stage in plan.forward])
    num_bits = int((types >= FIRST_BITS).sum())
    words = f"{len(types)} slices on rank {plan.rank}"
    if num_bits:
        words += f", {num_bits} of them blocks of bits"
    owners = [
        f"{number} {what}"
        for number, what in ((plan.entries.batch, "batch entries"), (plan.entries.heads, "heads"))
        if number > 1
    ]
    return f"{words}; masks of {' and '.join(owners)}" if owners else words


def _in_words(stages: list[Stage]) -> str:
    if stages[0].transfer is not None:
        return "one call, once all keys are there"
    if len(stages) == 1:
        return "one call, over a rank's own keys"
    number = "one stage" if len(stages) == 2 else f"{len(stages) - 1} stages"
    return f"a rank's own keys, then {number} of others, which travel while the stage before is computed"
