"""Checks that the ranks of a group call the same attention, before its rows travel (`docs/kernels/across_ranks.md`).
Each rank says in a hundred bytes what it is about to do, and every rank finds the same difference and raises the same
error.

    tensors on a CPU    in every call, by an all-gather
    tensors on a GPU    in the first call of its kind, that is of a plan, and shapes, dtype and options, and in every
                        64th call of the group, which also compares a hash of all calls since the last time

What a rank has asked before it keeps by itself, so on GPUs a rank may ask where others do not. It must not meet their
rows then: it asks hosts, by the CPU backend of the group or by its store, and waits for no device. Alone, it waits
until that times out.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from magi_compile import _compat
from magi_compile.dtensor.transport.collectives import COLLECTIVES, is_recorded
from magi_compile.ops.validation import DTYPES

if TYPE_CHECKING:
    from magi_compile.dtensor.call.arguments import Options
    from magi_compile.dtensor.call.execution import DevicePlan

EVERY = 64  # calls of a group with tensors on GPUs: those of a training step of 32 layers
KEPT = 1024  # kinds of calls
SECONDS_TO_SAY_SO = 5.0  # once an exchange has failed
SECONDS_BETWEEN_QUESTIONS = 0.05

_NAMES = ("auto", *COLLECTIVES)


class Agreement(NamedTuple):
    """The numbers that the ranks of a group must have in common when they call an attention."""

    digest: int
    cp_size: int
    dtype: int
    batch_entries: int
    nheads_q: int
    nheads_kv: int
    head_dim: int
    head_dim_v: int
    rows: int
    key_rows: int
    collective: int
    score: int
    softmax_scale: float
    softcap: float

    @staticmethod
    def of(plan: DevicePlan, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Agreement:
        """The call with this rank's plan and tensors, whose heads are those of all batch entries."""
        (rows, nheads_q, head_dim), (key_rows, nheads_kv, _) = q.shape, k.shape
        dtype, collective = _index(DTYPES, q.dtype), _index(_NAMES, options.collective)
        batch, score = options.batch_entries, options.score
        return Agreement(
            *(plan.digest, plan.cp_size, dtype, batch, nheads_q // batch, nheads_kv // batch),
            *(head_dim, v.shape[2], rows, key_rows, collective, _number_of(score) if score else 0),
            *(options.softmax_scale, options.softcap),
        )


@lru_cache(maxsize=1024)
def _number_of(text: str) -> int:
    """63 bits that two different texts do not share."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Said(NamedTuple):
    """The message of a rank to the others."""

    number: int  # of the call in this group, with tensors on GPUs
    is_backward: int
    history: int  # of the calls that were not compared
    rank: int  # whose plan it has
    call: Agreement


_NUMBER = struct.Struct("<q")
_FORMAT = struct.Struct(f"<4q{len(Agreement._fields) - 2}q2d")


class _Calls:
    """Those of one group."""

    def __init__(self) -> None:
        self.number = self.exchanges = self.history = 0
        self.known: OrderedDict[Hashable, None] = OrderedDict()
        self.reduce_groups: set[str] = set()
        self.store: Any = None  # once ranks have talked by it


_calls: WeakKeyDictionary[dist.ProcessGroup, _Calls] = WeakKeyDictionary()


def require_agreement(
    call: Agreement,
    rank: int,
    group: dist.ProcessGroup,
    reduce_group_name: str,
    device: torch.device,
    *,
    is_backward: bool = False,
) -> None:
    """All ranks of `group` call it together before they move rows of `device` for the attention `call`, or for its
    backward, by the plan of `rank`; the group of that name moves gradients.

    Raises ValueError, on every rank alike, if the ranks differ, or if a plan does not fit the group, and RuntimeError
    if other ranks do not call it, or if it would have to ask while a graph is being captured.
    """
    calls = _calls.get(group)
    if calls is None:
        calls = _calls[group] = _Calls()
    if reduce_group_name not in calls.reduce_groups:
        reduce_group = _compat.resolve_process_group(reduce_group_name, "reduce_group")
        ranks, others = map(dist.get_process_group_ranks, (group, reduce_group))
        if others != ranks:
            raise ValueError(
                f"`reduce_group` must hold the ranks of `group` in the same order, {ranks}, got {others}"
            )
        calls.reduce_groups.add(reduce_group_name)
    if device.type != "cpu":
        is_known = (call, rank) in calls.known
        if is_known and is_recorded(device):
            return  # a replay is no call
        calls.number += 1
        if is_known and calls.number % EVERY:
            calls.known.move_to_end((call, rank))
            calls.history = hash((calls.history, is_backward, call))
            return
    if (group.size(), call.cp_size, rank) == (1, 1, 0):
        return
    mine = _Said(calls.number, is_backward, calls.history, rank, call)
    every = [mine] if group.size() == 1 else _exchange(mine, calls, group, device)
    calls.history = 0
    _compare(every)
    if device.type != "cpu":
        calls.known[call, rank] = None
        if len(calls.known) > KEPT:
            calls.known.popitem(last=False)


def require_equal_groups(head_ranks: int, group: dist.ProcessGroup) -> None:
    """All ranks of `group` call it together before they make groups of so many ranks, in which they would wait for each
    other. As `require_agreement`, also if others call an attention meanwhile; and ValueError if ranks have made
    unequally many groups before."""
    numbers = [_number_of(f"groups of {head_ranks}"), group.size()]
    call = Agreement._make([*numbers, *[0] * (len(Agreement._fields) - len(numbers))])
    cpu = torch.device("cpu")
    require_agreement(call, group.rank(), group, group.group_name, cpu)
    have, words = _compat.number_of_groups(), ("make groups that share heads", "")
    every = _numbers_of_ranks(have, group, *words)
    if different := [rank for rank, x in enumerate(every) if x != every[0]]:
        raise ValueError(
            "all ranks of `mesh` must have made equally many process groups before some share heads (`head_ranks`), "
            f"because PyTorch names a new one by their number, but rank {different[0]} has {every[different[0]]} and "
            f"rank 0 has {every[0]}; give the ranks of the whole job the same ContextParallelOptions"
        )


def checksum_of(*tensors: Tensor) -> int:
    """A number that integer tensors of other values, or in another order, do not share. Waits for their devices."""
    total = 0
    for number, x in enumerate(tensors):
        x = x.detach().flatten().to(torch.int64)
        # Each entry is mixed with its place, as splitmix64 does; products wrap around.
        place = torch.arange(len(x), device=x.device) + (number << 32)
        mixed = x + (place + 1) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
        total ^= int((mixed ^ (mixed >> 27)).sum())
    return total


def require_equal_tokens(checksum: int, group: dist.ProcessGroup) -> None:
    """Plans agree where masks do, whatever the tokens are; this compares the tokens, by this rank's `checksum_of` its
    batch. All ranks of `group` call it together; their hosts talk, and wait for no device.

    Raises ValueError, on every rank, if the ranks have different tokens, and RuntimeError if other ranks do not call
    it.
    """
    words = ("take a batch", ", which does something else")
    every = _numbers_of_ranks(checksum, group, *words)
    if different := [rank for rank, x in enumerate(every) if x != every[0]]:
        raise ValueError(
            f"every rank of `group` must have the same tokens, but those of ranks {different} differ from those of "
            "rank 0; give all ranks of a group the same batches"
        )


def _numbers_of_ranks(number: int, group: dist.ProcessGroup, must: str, silent: str) -> list[int]:
    """The numbers of all ranks; the rest as in `_between_hosts`."""
    calls = _calls.setdefault(group, _Calls())
    arrived = _between_hosts(bytearray(_NUMBER.pack(number)), calls, group, must, silent)
    return [_NUMBER.unpack(x)[0] for x in arrived]


def _exchange(
    mine: _Said, calls: _Calls, group: dist.ProcessGroup, device: torch.device
) -> list[_Said]:
    """Exchanges the messages of all ranks, between hosts, whatever the device."""
    if is_recorded(device):
        raise RuntimeError(
            "the first use of a plan compares the ranks, which a CUDA graph cannot capture: run one "
            "warm-up step before the capture"
        )
    *numbers, call = mine
    what = "backward" if mine.is_backward else "forward"
    words = ("call the same attention", f" in a {what}, which has called something else")
    said = bytearray(_FORMAT.pack(*numbers, *call))
    arrived = _between_hosts(said, calls, group, *words)
    unpacked = [_FORMAT.unpack(x) for x in arrived]
    return [_Said(x[0], x[1], x[2], x[3], Agreement(*x[4:])) for x in unpacked]


def _between_hosts(
    said: bytearray, calls: _Calls, group: dist.ProcessGroup, must: str, silent: str
) -> list[bytes]:
    """Messages of one length from all ranks, in their order; an error says what ranks `must` do together, and what one
    that is `silent` does."""
    calls.exchanges += 1
    try:
        if "cpu:" in dist.get_backend_config(group):
            return _exchange_by_gather(said, calls.exchanges, group)
        if calls.store is None:
            calls.store = _store_of(group)
        return _exchange_by_store(bytes(said), calls.exchanges, group, calls.store)
    except RuntimeError as error:
        ranks = error.ranks if isinstance(error, _SilentRanksError) else ()
        whom = " and ".join(f"rank {rank}" for rank in ranks) or "another rank"
        raise RuntimeError(
            f"all ranks of `group` must {must} together, but rank {group.rank()} has not heard of {whom}{silent}, or "
            f"has ended: {error}"
        ) from error


def _exchange_by_gather(said: bytearray, number: int, group: dist.ProcessGroup) -> list[bytes]:
    packed = torch.frombuffer(said, dtype=torch.uint8)
    every = [torch.empty_like(packed) for _ in range(group.size())]
    try:
        dist.all_gather(every, packed, group)
    except RuntimeError as error:
        raise _SilentRanksError(_who_is_silent(bytes(said), number, group), error) from error
    return [bytes(x.tolist()) for x in every]


class _SilentRanksError(RuntimeError):
    """Ranks, if they are known, that have said nothing in time."""

    def __init__(self, ranks: Sequence[int], error: RuntimeError):
        super().__init__(str(error))
        self.ranks = ranks


def _key(number: int, rank: int) -> str:
    return f"magi_compile/{number}/{rank}"


def _who_is_silent(said: bytes, number: int, group: dist.ProcessGroup) -> list[int]:
    """The ranks that do not say that the `number`-th exchange has failed for them too; nothing if nobody knows."""
    try:
        store = _compat.store_of(group)
        store.set(_key(number, group.rank()), said)
        silent = [*range(group.size())]
        end = time.monotonic() + min(
            _compat.timeout_of(group).total_seconds() / 4, SECONDS_TO_SAY_SO
        )
        while silent := [rank for rank in silent if not store.check([_key(number, rank)])]:
            if time.monotonic() > end:
                break
            time.sleep(SECONDS_BETWEEN_QUESTIONS)  # all ranks ask one host
        return silent
    except (RuntimeError, ValueError, KeyError):  # the store, or its group, has gone too
        return []


class _Store(NamedTuple):
    """The store of a group; `is_own` if it is by a connection of its own, so that it may have the group's timeout."""

    store: Any
    is_own: bool
    timeout: Callable[[], timedelta]  # of the group


def _store_of(group: dist.ProcessGroup) -> _Store:
    store = _compat.own_store_of(group)
    is_own = store is not _compat.store_of(group)
    return _Store(store, is_own, _compat.timeout_reader(group))


def _exchange_by_store(
    said: bytes, number: int, group: dist.ProcessGroup, by: _Store
) -> list[bytes]:
    """Exchanges the `number`-th messages of all ranks of the group through the store."""
    store, timeout = by.store, by.timeout()
    if by.is_own and store.timeout != timeout:
        store.set_timeout(timeout)
    store.set(_key(number, group.rank()), said)
    keys = [_key(number, rank) for rank in range(group.size())]
    try:
        if store.timeout != timeout:
            store.wait(keys, timeout)
        arrived = store.multi_get(keys) if store.has_extended_api() else [*map(store.get, keys)]
    except RuntimeError as error:
        silent = []
        with suppress(RuntimeError):
            silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise _SilentRanksError(silent, error) from error
    # Who has said this has read what was said before.
    if number > 1:
        store.delete_key(_key(number - 1, group.rank()))
    return arrived


def _compare(every: Sequence[_Said]) -> None:
    """Raises if the ranks differ; `every`: what they say, in their order."""
    calls, size = [x.call for x in every], len(every)
    strangers = {rank: x.rank for rank, x in enumerate(every) if x.rank != rank}
    is_one = len({(x.number, x.is_backward, x.history, x.call) for x in every}) == 1
    if is_one and calls[0].cp_size == size and not strangers:
        return
    if differ := _of(every, lambda x: x.is_backward, lambda x: "backward" if x else "forward"):
        raise ValueError(f"all ranks of `group` must be in the same pass, but {differ}")
    if misfits := [rank for rank, x in enumerate(calls) if x.cp_size != size]:
        planned = sorted({calls[rank].cp_size for rank in misfits})
        raise ValueError(
            f"`plan` must be made for the {size} ranks of `group`, but ranks {misfits} have a plan for "
            f"{', '.join(map(str, planned))}; call plan_rank with cp_size=group.size()"
        )
    if different := [rank for rank, x in enumerate(calls) if x.digest != calls[0].digest]:
        raise ValueError(
            f"every rank must plan the same mask with the same options, but the plans of ranks {different} differ from "
            "that of rank 0; give every rank the same mask and the same ContextParallelOptions"
        )
    if strangers:
        listed = ", ".join(
            f"rank {rank} has the plan of rank {whose}" for rank, whose in strangers.items()
        )
        raise ValueError(
            f"`plan` must be each rank's own, but {listed}; call plan_rank with rank=group.rank()"
        )
    for field, (what, name) in _ASPECTS.items():
        if differ := _of(calls, itemgetter(Agreement._fields.index(field)), name):
            raise ValueError(f"{what} must be the same on all ranks of `group`, but {differ}")
    if differ := _of(every, lambda x: x.number, lambda x: f"call {x}"):
        raise ValueError(f"all ranks of `group` must call attention equally often, but {differ}")
    raise ValueError(
        "all ranks of `group` must call the same attentions in the same order, but ranks "
        f"{[rank for rank, x in enumerate(every) if x.history != every[0].history]} have called others than rank 0 "
        "since the ranks were compared last; give every rank the same masks in the same order"
    )


_ASPECTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "dtype": ("the dtype of `q`, `k` and `v`", lambda x: str(DTYPES[x])),
    "batch_entries": ("the batch entries of `q`, `k` and `v`", str),
    "nheads_q": ("the heads of `q`", str),
    "nheads_kv": ("the heads of `k` and `v`", str),
    "head_dim": ("the head_dim of `q` and `k`", str),
    "head_dim_v": ("the head_dim of `v`", str),
    "rows": ("the rows of `q`", str),
    "key_rows": ("the rows of `k` and `v`", str),
    "softmax_scale": ("the scale of the scores", str),
    "softcap": ("`softcap`", str),
    "collective": ("`collective`", lambda x: _NAMES[x]),
    "score": ("`score_mod`", lambda x: f"score program {x:016x}" if x else "none"),
}


def _of(every: Sequence[Any], value: Callable[[Any], Any], name: Callable[[Any], str]) -> str:
    """The ranks with another value than rank 0, in words; empty for none."""
    first = value(every[0])
    found = [(rank, value(x)) for rank, x in enumerate(every) if value(x) != first]
    listed = ", ".join(f"rank {rank} has {name(x)}" for rank, x in found)
    return f"{listed} and rank 0 has {name(first)}" if found else ""


def _index(known: Sequence[Any], x: Any) -> int:
    return known.index(x) if x in known else -1
