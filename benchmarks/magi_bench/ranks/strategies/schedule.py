"""HybridCP's balanced schedule, as Megatron-LM's hybrid context parallelism has it: each document gets as many ranks as
its length asks for, and rounds of documents are made so that all ranks have as much to do.

Work is the square of the length over the number of ranks. Groups are consecutive ranks, in the order in which they were
made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

#: A bucket ends before it has more than so many times its share of the work.
BUCKET_SLACK = 1.1
#: Ranks are balanced where the least loaded has at most this share less than the most loaded.
BALANCED = 0.05


@dataclass
class Group:
    """Some ranks and the documents that they work on together, one after the other."""

    size: int  # how many ranks
    documents: list[int] = field(default_factory=list)  # their numbers
    lengths: list[int] = field(default_factory=list)  # their tokens

    @property
    def load(self) -> float:
        """The work of each rank."""
        return sum(length**2 for length in self.lengths) / self.size

    def take(self, document: int, length: int) -> None:
        self.documents.append(document)
        self.lengths.append(length)

    def drop(self) -> tuple[int, int]:
        """Gives the last document back."""
        return self.documents.pop(), self.lengths.pop()


def ranks_for(length: int, most_tokens: int, num_ranks: int) -> int:
    """The least power of two of ranks, or all of them, that have at most so many tokens of a document each."""
    return min(2 ** max(math.ceil(math.log2(length / most_tokens)), 0), num_ranks)


def schedule(lengths: Sequence[int], num_ranks: int, most_tokens: int) -> list[list[Group]]:
    """Rounds of groups, where a rank has at most so many tokens of a document. The groups of a round are of
    consecutive ranks; together they have all ranks, and each has a document, as long as there are enough documents or
    ranks to share them."""
    left = sorted(enumerate(lengths), key=lambda x: x[1], reverse=True)
    rounds = []
    while left:
        groups, left = _round(left, num_ranks, most_tokens)
        rounds.append(groups)
    return rounds


def best_schedule(lengths: Sequence[int], num_ranks: int, tokens: int) -> list[list[Group]]:
    """The schedule for the most tokens of a document on a rank, `tokens` or a half of it, a quarter and so on, that
    lets no rank have much more work than the best of these does: a user of Megatron-LM sets this number."""
    options = [max(tokens >> i, 1) for i in range(num_ranks.bit_length())]
    found = [schedule(lengths, num_ranks, most_tokens) for most_tokens in options]
    most = [max(total_loads(rounds, num_ranks)) for rounds in found]
    return next(
        x for x, load in zip(found, most, strict=True) if load <= min(most) * (1 + BALANCED)
    )


def total_loads(rounds: Sequence[Sequence[Group]], num_ranks: int) -> list[float]:
    """The work of each rank in all rounds."""
    loads = (_loads(groups, num_ranks) for groups in rounds)
    return [sum(x) for x in zip(*loads, strict=True)]


def _round(
    documents: list[tuple[int, int]], num_ranks: int, most_tokens: int
) -> tuple[list[Group], list[tuple[int, int]]]:
    """The groups of a round, and the documents that are left for later ones."""

    def size_of(length: int) -> int:
        return ranks_for(length, most_tokens, num_ranks)

    groups: list[Group] = []
    buckets = [deque(x) for x in _buckets(documents, [size_of(x) for _, x in documents])]
    first_size = None
    while buckets:
        free = num_ranks - sum(group.size for group in groups)
        sizes = {group.size for group in groups}
        needed = [(size_of(bucket[0][1]), bucket) for bucket in buckets]
        placeable = ((x, bucket) for x, bucket in needed if x in sizes or x <= free)
        size, bucket = next(placeable, (0, None))
        if bucket is None:
            break
        # An idle group is as good as free ranks, which have no load either.
        least = min((x for x in groups if x.size == size), key=lambda x: x.load, default=None)
        if least is None or (size <= free and least.load > 0):
            least = Group(size)
            groups.append(least)
        least.take(*bucket.popleft())
        buckets = [x for x in buckets if x]
        first_size = first_size or size
        if size < first_size and _is_balanced(_loads(groups, num_ranks)):
            break
    left = [x for bucket in buckets for x in bucket]
    left += _trimmed(groups, num_ranks)
    _fill(groups, num_ranks)
    return groups, left


def _buckets(documents: list[tuple[int, int]], sizes: list[int]) -> list[list[tuple[int, int]]]:
    """The documents, longest first, in as many buckets of about equal work as there are sizes of groups."""
    work = [length**2 / size for (_, length), size in zip(documents, sizes, strict=True)]
    number, target = len(set(sizes)), sum(work) / len(set(sizes))
    made: list[list[tuple[int, int]]] = [[]]
    load = 0.0
    for i, (document, its_work) in enumerate(zip(documents, work, strict=True)):
        is_over = load + its_work > BUCKET_SLACK * target
        must_leave_some = len(documents) - i <= number - len(made)
        if made[-1] and len(made) < number and (is_over or must_leave_some):
            made.append([])
            load = 0.0
        made[-1].append(document)
        load += its_work
    return made


def _loads(groups: Sequence[Group], num_ranks: int) -> list[float]:
    """The work of each rank."""
    loads = [group.load for group in groups for _ in range(group.size)]
    return loads + [0.0] * (num_ranks - len(loads))


def _is_balanced(loads: Sequence[float]) -> bool:
    return max(loads) - min(loads) <= BALANCED * max(loads)


def _trimmed(groups: list[Group], num_ranks: int) -> list[tuple[int, int]]:
    """Takes the last documents of the most loaded groups away, as long as loads come closer; returns them."""
    taken: list[tuple[int, int]] = []
    while True:
        loads = _loads(groups, num_ranks)
        heaviest = max(groups, key=lambda x: x.load)
        if _is_balanced(loads) or not min(loads) or len(heaviest.documents) == 1:
            return taken
        document = heaviest.drop()
        after = _loads(groups, num_ranks)
        if max(after) - min(after) >= max(loads) - min(loads):
            heaviest.take(*document)
            return taken
        taken.append(document)


def _fill(groups: list[Group], num_ranks: int) -> None:
    """Doubles the first of the smallest groups, or gives it what is left, until no rank is without work; the groups
    behind it move on."""
    while free := num_ranks - sum(group.size for group in groups):
        smallest = min(groups, key=lambda x: x.size)
        smallest.size += min(smallest.size, free)
