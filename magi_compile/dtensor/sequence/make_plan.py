"""`plan`: spreads a sequence over ranks by its mask. Reads and checks what a user says of masks, lengths,
keys and ranks."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from magi_compile import _compat
from magi_compile._kept import Made, Memo
from magi_compile._warnings import warn_once
from magi_compile.dtensor.planning.chunks import Placement
from magi_compile.dtensor.planning.cost import CostModel
from magi_compile.dtensor.planning.cover import ONE_ENTRY, Cover, Entries
from magi_compile.dtensor.planning.hosts import (
    hosts_of,
    launched_hosts,
    launched_ranks,
    neighbours_on_hosts,
)
from magi_compile.dtensor.planning.one_thread import one_thread
from magi_compile.dtensor.planning.rank_plan import (
    Ahead,
    ContextParallelOptions,
    RankPlan,
    plan_rank_together,
    planner,
)
from magi_compile.dtensor.ranks.agreement import require_equal_groups
from magi_compile.dtensor.sequence.explain import (
    PlanExplanation,
    explain_plan,
    predicted_seconds,
)
from magi_compile.dtensor.sequence.sequence_plan import SequencePlan
from magi_compile.dtensor.sequence.spread_mask import SpreadMask
from magi_compile.dtensor.sequence.spread_tokens import SpreadTokens
from magi_compile.masks import AttnSlices
from magi_compile.masks.arguments import check_count
from magi_compile.masks.block_mask import (
    Converted,
    convert_mask_mod,
    convert_whole_block_mask,
    reached_by,
)
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.ops.validation import check_list

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Mask: TypeAlias = Union["BlockMask", AttnSlices, MaskMod, None]

Lengths: TypeAlias = int | tuple[int, int] | None

DEFAULTS = ContextParallelOptions()

#: By how much faster passes must be predicted where ranks share heads, before they do so unasked.
SHARE_GAIN = 0.05


@dataclass(frozen=True, eq=False)
class HostPlan:
    """One rank's plan before it has a process group and a device. Made by `plan(..., ranks=(cp_size, rank))`.

    It can be pickled, as one object without shared memory, however many tensors it holds.

    Attributes:
        slices: the mask of the whole sequence, on the CPU; None where no slices say all of it. A plan of blocks of bits
            has those of its rank alone.
        planned: the plan of the rank.
        cost: the rates by which it was planned.
        of_unknown: the indices, "b", "h" or both, that the mask depends on and does not say the number of: it is that
            of the first batch entry or head.
    """

    slices: AttnSlices | None
    planned: RankPlan
    cost: CostModel
    of_unknown: str

    @_compat.outside_of_modes()
    def on(self, mesh: DeviceMesh | dist.ProcessGroup) -> SequencePlan:
        """The plan with its group and device; does not communicate, but where ranks share heads the first time (see
        `plan`).

        Args:
            mesh: as in `plan`.

        Returns:
            The plan.

        Raises:
            TypeError: `mesh` is neither.
            ValueError: `mesh` has another number of ranks than the plan, or of those that share heads, or this process
                is another one of them.
        """
        where = self.planned
        groups = groups_of(mesh, where.head_ranks)
        group = groups.attention
        have, want = (group.size(), group.rank()), (where.dispatch.cp_size, where.rank)
        if have != want:
            which = "ranks" if where.head_ranks == 1 else f"groups of {where.head_ranks} ranks"
            raise ValueError(
                f"`mesh` must be that of `ranks`, {want[0]} {which} of which this is {want[1]}, got "
                f"{have[0]} {which} of which this is {have[1]}"
            )
        return _placed([self], [None], groups, _device_of(mesh))[0]

    def explain(self, cost: CostModel | None = None) -> PlanExplanation:
        """Explains the plan for all ranks, as `SequencePlan.explain` does.

        Args:
            cost: the rates of the prediction; None takes those of the plan's options.

        Returns:
            The explanation; print it.

        Raises:
            TypeError: `cost` is no CostModel.
        """
        return explain_plan(self.planned, self.cost if cost is None else cost)

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: workers of a DataLoader would put every tensor into a shared memory of its own.
        parts = (self.slices, self.planned, self.cost, self.of_unknown)
        return _unpickled, (pickle.dumps(parts, pickle.HIGHEST_PROTOCOL),)


def _unpickled(parts: bytes) -> HostPlan:
    return HostPlan(*pickle.loads(parts))


HostPlans: TypeAlias = HostPlan | list[HostPlan] | dict[str, HostPlan]


@overload
def plan(
    mask: Mask,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    seqlen: Lengths = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
    keys: SpreadTokens | None = None,
) -> SequencePlan: ...


@overload
def plan(
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    masks: Sequence[Mask],
    weights: Sequence[int] | None = None,
    seqlen: Lengths = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
    keys: Sequence[SpreadTokens | None] | None = None,
) -> list[SequencePlan]: ...


@overload
def plan(
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    masks: Mapping[str, Mask],
    weights: Mapping[str, int] | None = None,
    seqlen: Lengths = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
    keys: Mapping[str, SpreadTokens] | None = None,
) -> dict[str, SequencePlan]: ...


@overload
def plan(
    mask: Mask = None,
    *,
    ranks: tuple[int, int],
    masks: Sequence[Mask] | Mapping[str, Mask] | None = None,
    weights: Sequence[int] | Mapping[str, int] | None = None,
    seqlen: Lengths = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
) -> HostPlans: ...


def plan(
    mask: Any = None,
    mesh: Any = None,
    *,
    masks: Any = None,
    weights: Any = None,
    seqlen: Lengths = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
    keys: Any = None,
    ranks: tuple[int, int] | None = None,
) -> Any:
    """Spreads a sequence over ranks by its attention mask: equal work for each rank, and little communication.

    Every rank calls it with the same mask. It does not communicate (but see `mesh`); attention compares the plans of
    all ranks before rows travel. Recent plans are kept. With a BlockMask on a GPU, or a mask_mod that captures a tensor
    there, it waits for the device; with `AttnSlices`, or a mask_mod of tensors on the CPU, it does not, and a step may
    be planned while the GPU runs the one before.

    Where a mask has more or fewer keys than queries (cross attention), keys are a sequence of their own, which is
    spread too: `SequencePlan.keys`. Every rank holds equally many, as far as possible those that its queries see.

    Args:
        mask: the mask of the whole sequence: a BlockMask (PyTorch's or that of `magi_compile.create_block_mask`),
            `AttnSlices`, or a mask_mod. None is causal. Where batch entries or heads have masks of their own, a
            BlockMask that is made for as many.
        mesh: the ranks: a mesh of one dimension (`mesh["cp"]` of a larger one) or a process group. Where some share
            heads (`head_ranks` of `options`), its first plan makes two process groups, which its ranks do together.
        masks: instead of `mask`, the masks of a model whose layers differ: a list, or a dict by name. Tokens are placed
            once, so that each rank has the same total work.
        weights: how many layers have each of `masks`, as a list or dict like it; 1 each by default.
        seqlen: tokens of the sequence; required for a mask_mod and for None. For cross attention a pair: queries, keys.
        options: how to spread; the same on every rank.
        permutation: for tokens that are permuted already and cut in equal parts: `[S]` or `[1, S]`, which token lies
            where, a load balancer of PyTorch or torchtitan, or another plan, whose tokens these are, padding included.
            The mask stays in the sequence's own order, and `options` do not place tokens.
        keys: a plan whose tokens are the keys, for example that of the encoder's self-attention; keys then lie where it
            has them, and there may be as many as queries. For `masks` a list or dict like it; None, or a missing name,
            where the keys are placed here.
        ranks: instead of `mesh`, `(cp_size, rank)`, for a process that has no process group, such as a worker of a
            DataLoader. Gives a `HostPlan`, which can be pickled, and whose `on(mesh)` is the `SequencePlan`. Where
            hosts are not among `options`, ranks are taken for neighbours in the job, from rank 0 on.

    Returns:
        This rank's `SequencePlan`, with `ranks` its `HostPlan`. For `masks`, one plan for each, in a list or dict like
        it; all hold the same tokens. The order of a dict does not count.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: `head_ranks` of `options` does not divide the ranks, or the tokens of a group;
            the mesh has more than one dimension or lacks this process; `seqlen` is missing or differs from the
            mask's; `masks` have different lengths; `weights` do not fit them; `permutation` is not a permutation of the
            sequence; `keys` are not as many as those of the mask; `ranks` are no rank of so many, or come with `mesh`
            or `keys`.
        UnsupportedMaskError: the mask_mod can be neither read nor evaluated: it branches on its arguments, for example.
        MaskDataError: the mask_mod looks up what a captured tensor does not have, or block lists contradict it.
    """
    rest = {"masks": masks, "weights": weights, "seqlen": seqlen, "options": options}
    choices = _Where.choices(mesh, options, ranks, permutation, keys)
    return _planned(mask, choices, permutation=permutation, keys=keys, **rest)()


class RankGroups(NamedTuple):
    """The ranks of a mesh, in the groups that a plan needs."""

    attention: (
        dist.ProcessGroup
    )  # a rank of the plan each; where some share heads, those with the same heads
    tokens: dist.ProcessGroup  # all ranks
    heads: dist.ProcessGroup | None = None  # those that share heads with this one, if some do


class _Where(NamedTuple):
    """The ranks of a plan, of which each is so many that share heads."""

    tokens: dist.ProcessGroup | None  # all; None in a process that has no group of them
    device: torch.device
    size: int  # of ranks of the plan
    rank: int  # this one of these
    in_job: Sequence[
        int
    ]  # the numbers that they have there, of those that share heads the first one's
    share: int

    @staticmethod
    def choices(
        mesh: Any, options: Any, ranks: Any = None, permutation: Any = None, keys: Any = None
    ) -> list[_Where]:
        """As the arguments of `plan` say; several where the cost model is to choose. Of this thread: another one has
        another current device."""
        if not isinstance(options, ContextParallelOptions):
            return [_Where.of(mesh, ranks, keys, 1)]
        share, tokens = options.head_ranks, keys if permutation is None else permutation
        if tokens is not None and share is None:
            share = _share_of_tokens(tokens, options.cost.heads)
        found = [_Where.of(mesh, ranks, keys, share or 1)]
        if share is None and (most := _share_of_hosts(options, found[0])) > 1:
            found.append(_Where.of(mesh, ranks, keys, most))
        for where in found:
            if where.tokens is not None:
                # Now, and not once they are chosen: ranks whose masks differ would wait for each other.
                groups_of(where.tokens, where.share)
        return found

    @staticmethod
    def of(mesh: Any, ranks: Any, keys: Any, share: int) -> _Where:
        """Where so many ranks share heads."""
        tokens = None
        if ranks is not None:
            for name, x in (("mesh", mesh), ("keys", keys)):
                if x is not None:
                    raise ValueError(f"`{name}` must be None where `ranks` is given, got {x!r}")
            device, (size, rank) = torch.device("cpu"), _ranks_of(ranks)
            in_job: Sequence[int] = range(size)
        else:
            tokens, device = group_of(mesh), _device_of(mesh)
            size, rank = tokens.size(), tokens.rank()
            in_job = dist.get_process_group_ranks(tokens)
        _check_divides(size, share)
        return _Where(tokens, device, size // share, rank // share, in_job[::share], share)

    def options(self, options: Any) -> Any:
        """The options for these ranks, hosts among them."""
        if not isinstance(options, ContextParallelOptions):
            return options
        hosts: Any = options.hosts
        if hosts is None:
            hosts = launched_hosts(self.in_job)
        elif self.share > 1:
            # Those of ranks, of which a plan has one for each group that shares heads.
            of_ranks = hosts_of(hosts, self.size * self.share)
            hosts = self.size if of_ranks is None else of_ranks[:: self.share]
        return replace(options, hosts=hosts, head_ranks=self.share)


def _share_of_tokens(tokens: Any, heads: tuple[int, int] | None) -> int:
    """How many ranks share heads unasked where tokens lie as in plans that are given: as many as in these, if they are
    as many in all and divide the heads."""
    if isinstance(tokens, Mapping):
        tokens = tokens.values()
    elif not isinstance(tokens, (list, tuple)):
        tokens = [tokens]
    shares = {x.head_ranks for x in tokens if isinstance(x, SequencePlan)}
    share = shares.pop() if len(shares) == 1 else 1
    return share if heads is not None and heads[0] % share == 0 else 1


def _share_of_hosts(options: ContextParallelOptions, where: _Where) -> int:
    """How many ranks may share heads unasked: the most that divide the ranks of a host, the heads of the cost model and
    chunks of a given size."""
    if options.cost.heads is None or list(where.in_job) != sorted(where.in_job):
        return 1
    hosts = hosts_of(where.options(options).hosts, where.size)
    return math.gcd(neighbours_on_hosts(hosts), options.cost.heads[0], options.chunk_size or 0)


def _ranks_of(given: Any) -> tuple[int, int]:
    """The number of ranks, and which one this is."""
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"`ranks` must be a pair (cp_size, rank), got {given!r}")
    size, rank = given
    if any(not isinstance(x, int) or isinstance(x, bool) for x in given):
        raise TypeError(f"`ranks` must be a pair of ints, (cp_size, rank), got {given!r}")
    if not 0 <= rank < size < 1 << 31:
        raise ValueError(
            f"`ranks` must be (cp_size, rank) with a rank in [0, cp_size), got {given!r}"
        )
    return size, rank


@one_thread()
@_compat.outside_of_modes()
def _planned(
    mask: Any,
    choices: Sequence[_Where],
    *,
    masks: Any = None,
    weights: Any = None,
    seqlen: Lengths = None,
    options: ContextParallelOptions = DEFAULTS,
    permutation: Any = None,
    keys: Any = None,
) -> Callable[[], Any]:
    """Does what `plan` does on the host, and returns the function that does the rest, on the device."""
    if (
        isinstance(options, ContextParallelOptions)
        and options.hierarchical
        and options.hosts is None
        and not launched_ranks()
    ):
        warn_once(
            "`hierarchical=True` changes nothing: torchrun does not say which ranks share a host, so all are taken "
            "to share one; give `hosts`"
        )
    is_one = masks is None
    if not is_one and mask is not None:
        raise ValueError(
            "one of `mask` and `masks` must be None, got both; put `mask` among `masks`"
        )
    if is_one and weights is not None:
        raise ValueError(
            f"`weights` must be None where `masks` is None, got {weights!r}; give several masks as `masks`"
        )
    given = [mask] if is_one else masks
    if not isinstance(given, (list, tuple, Mapping)):
        raise TypeError(f"`masks` must be a list or a dict of masks, got {type(given).__name__}")
    names: Any = range(len(given))
    if isinstance(given, Mapping):
        names = sorted(given)  # ranks may hold them in another order
        given = {name: given[name] for name in names}
    listed = [given[name] for name in names]
    counts = None if weights is None else _weights_of(weights, given)
    tokens = [keys] if is_one else _keys_of(keys, given)
    device = choices[0].device
    for x in tokens:
        _check_keys(x, choices[0].tokens)
    converted = [
        _converted(
            "mask" if is_one else f"masks[{name!r}]", x, _lengths_of(seqlen, of_keys), device
        )
        for name, x, of_keys in zip(names, listed, tokens, strict=True)
    ]

    def plans_of(where: _Where) -> list[RankPlan]:
        size, share = where.size, where.share
        return plan_rank_together(
            [x.slices for x in converted],
            *(size, where.rank, where.options(options)),
            weights=counts,
            permutation=None if permutation is None else _permutation_of(permutation, size, share),
            keys=None
            if keys is None
            else [None if x is None else x.placement_on(size, share) for x in tokens],
        )

    where, planned = _fastest(choices, plans_of, options, counts)
    hosts = [
        HostPlan(
            None if isinstance(x.slices, Cover) else x.slices, of_rank, options.cost, x.of_unknown
        )
        for x, of_rank in zip(converted, planned, strict=True)
    ]

    @one_thread()
    @_compat.outside_of_modes()
    def placed() -> Any:
        made: list[Any] = hosts
        if where.tokens is not None:
            made = _placed(hosts, tokens, groups_of(where.tokens, where.share), device)
        if is_one:
            return made[0]
        if not isinstance(masks, Mapping):
            return made
        by_name = dict(zip(names, made, strict=True))
        return {name: by_name[name] for name in masks}

    return placed


def _fastest(
    choices: Sequence[_Where],
    plans_of: Callable[[_Where], list[RankPlan]],
    options: ContextParallelOptions,
    weights: Sequence[int] | None,
) -> tuple[_Where, list[RankPlan]]:
    """The ranks whose passes over all masks are predicted to be fastest, and their plans; the same on all ranks. The
    first ones, unless others gain `SHARE_GAIN`."""
    found = [(where, plans_of(where)) for where in choices]
    if len(found) == 1:
        return found[0]
    seconds = [
        sum(
            weight * predicted_seconds(x, options.cost)
            for x, weight in zip(plans, weights or [1] * len(plans), strict=True)
        )
        for _, plans in found
    ]
    fastest = min(range(len(found)), key=seconds.__getitem__)
    return found[fastest if seconds[fastest] < seconds[0] * (1 - SHARE_GAIN) else 0]


def plan_ahead(mask: Mask = None, mesh: Any = None, **arguments: Any) -> Future[Any]:
    """`plan` on a thread of its own: a step is planned while the GPU runs the one before. Plans queue up.

    The host shares one interpreter with that thread. Where it has no time to spare, plan in the workers of a DataLoader
    instead: `plan(mask, ranks=(cp_size, rank))`.

    Args:
        mask: as in `plan`; of tensors on the CPU, because others make the thread wait for the GPU. None for `masks`.
        mesh: as in `plan`; None for `ranks`.
        **arguments: the other arguments of `plan`.

    Returns:
        A future: its `result()` gives what `plan` returns, or raises what that raises. It puts the plan on the device
        of the mesh, in the order of the current stream. The future belongs to this process: in a fork, for example a
        worker of a DataLoader, ask again.
    """
    try:
        options = arguments.get("options", DEFAULTS)
        tokens = (arguments.get(name) for name in ("permutation", "keys"))
        choices = _Where.choices(mesh, options, arguments.pop("ranks", None), *tokens)
    except (TypeError, ValueError) as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return Ahead(failed)
    return Ahead(planner().submit(_planned, mask, choices, **arguments), choices[0].device)


def _placed(
    hosts: Sequence[HostPlan],
    tokens: Sequence[SpreadTokens | None],
    groups: RankGroups,
    device: torch.device,
) -> list[SequencePlan]:
    """The plans with their groups; keys that lie alike are one SpreadTokens."""
    spread: dict[Placement, SpreadTokens] = {}
    made = []
    for host, of_keys in zip(hosts, tokens, strict=True):
        where = host.planned.dispatch.other_keys
        if of_keys is None and where is not None:
            if where not in spread:
                spread[where] = SpreadTokens(where, groups.tokens.rank(), groups.tokens, device)
            of_keys = spread[where]
        made.append(SequencePlan(host, *groups, device, of_keys))
    return made


def _permutation_of(given: Any, size: int, share: int) -> Tensor | Placement:
    """int64 `[S]`, on the CPU; of a plan its placement on so many groups of `share` ranks."""
    if isinstance(given, SpreadTokens):
        return given.placement_on(size, share)
    x = given if isinstance(given, Tensor) else _compat.indices_of_load_balancer(given)
    if not isinstance(x, Tensor):
        raise TypeError(
            "`permutation` must be a tensor or a load balancer of PyTorch's or torchtitan's, got "
            f"{type(given).__name__}"
        )
    if x.dtype.is_floating_point or x.dtype == torch.bool or x.ndim not in (1, 2):
        raise ValueError(
            f"`permutation` must be integers [S] or [1, S], got {x.dtype} {list(x.shape)}"
        )
    if x.ndim == 2:
        if not bool((x == x[:1]).all()):
            raise NotImplementedError(
                "`permutation` must be the same for all entries of a batch, got different ones; "
                "permute all entries alike"
            )
        x = x[0]
    return x.to("cpu", torch.int64)


def _weights_of(weights: Any, masks: Any) -> list[int]:
    if isinstance(weights, Mapping) != isinstance(masks, Mapping):
        raise TypeError(
            f"`weights` must be a {type(masks).__name__} like `masks`, got {type(weights).__name__}"
        )
    if not isinstance(masks, Mapping):
        check_list("weights", weights)
        return list(weights)
    if set(weights) != set(masks):
        raise ValueError(
            f"`weights` must have the names of `masks`, {list(masks)}, got {list(weights)}"
        )
    return [weights[name] for name in masks]


def _keys_of(keys: Any, masks: Any) -> list[SpreadTokens | None]:
    """For each of `masks`, which are a list or a dict."""
    if keys is None:
        return [None] * len(masks)
    kind = dict if isinstance(masks, Mapping) else list
    if not isinstance(keys, Mapping if kind is dict else (list, tuple)):
        raise TypeError(f"`keys` must be a {kind.__name__} like `masks`, got {type(keys).__name__}")
    if not isinstance(keys, Mapping):
        if len(keys) != len(masks):
            raise ValueError(
                f"`keys` must have an entry for each of the {len(masks)} masks, got {len(keys)}"
            )
        return list(keys)
    if not set(keys) <= set(masks):
        raise ValueError(f"`keys` must have names of `masks`, {list(masks)}, got {list(keys)}")
    return [keys.get(name) for name in masks]


def _check_keys(keys: Any, group: dist.ProcessGroup | None) -> None:
    if keys is None or group is None:  # without a group there are none
        return
    if not isinstance(keys, SpreadTokens):
        raise TypeError(
            f"`keys` must be the SequencePlan whose tokens the keys are, got {type(keys).__name__}"
        )
    name = group.group_name
    if keys.group_name != name:
        raise ValueError(
            f"`keys` must be spread over the ranks of `mesh`, group {name!r}, got {keys.group_name!r}"
        )


def _lengths_of(seqlen: Any, keys: SpreadTokens | None) -> tuple[int, int] | None:
    """The lengths of queries and keys in `seqlen`."""
    if seqlen is None:
        return None
    pair = seqlen if isinstance(seqlen, (tuple, list)) else (seqlen, keys.total if keys else seqlen)
    if len(pair) != 2:
        raise ValueError(
            f"`seqlen` must be a number, or those of queries and of keys, got {seqlen}"
        )
    for length in pair:
        check_count("seqlen", length, 1)
    return pair[0], pair[1]


class _Given(NamedTuple):
    """A mask that was read."""

    slices: AttnSlices  # on the CPU, or a cover
    # The indices that it depends on, b or h, of which it does not say how many there are
    of_unknown: str = ""


def _converted(
    name: str, mask: Any, seqlen: tuple[int, int] | None, device: torch.device
) -> _Given:
    """A mask that errors call `name`."""
    from torch.nn.attention.flex_attention import BlockMask

    if isinstance(mask, BlockMask):
        if isinstance(mask.mask_mod, SpreadMask):
            raise ValueError(
                f"`{name}` must cover the whole sequence, got the mask of a plan; pass the original mask"
            )
        found = _of_block_mask(mask)
    elif isinstance(mask, AttnSlices):
        found = _Given(mask.to("cpu"))
    elif mask is not None and not callable(mask):
        raise TypeError(
            f"`{name}` must be a BlockMask, AttnSlices, a mask_mod or None, got {type(mask).__name__}"
        )
    elif seqlen is None:
        kind = "a mask_mod" if callable(mask) else "None (causal)"
        raise ValueError(
            f"`seqlen` must be given where `{name}` is {kind}, which has no length, got None"
        )
    elif mask is None:
        if seqlen[0] != seqlen[1]:
            raise ValueError(
                f"`{name}` must be given for {seqlen[0]} queries and {seqlen[1]} keys, got None (causal)"
            )
        found = _Given(AttnSlices.causal(seqlen[0]))
    else:
        found = _given(convert_mask_mod(mask, *seqlen, device), ONE_ENTRY)
    slices = found.slices
    lengths = (slices.seqlen_q, slices.seqlen_k)
    if seqlen is not None and lengths != seqlen:
        wanted, got = (x[0] if x[0] == x[1] else x for x in (lengths, seqlen))
        raise ValueError(f"`seqlen` must be the length of `{name}`, {wanted}, got {got}")
    return found


# Those that were evaluated for all pairs, which takes long.
_evaluated: Memo[_Given] = Memo(16, lambda given: [])


def _of_block_mask(mask: BlockMask) -> _Given:
    def convert() -> Made:
        reached = reached_by(mask)  # followed before it is called, since that may change it
        of_mask = convert_whole_block_mask(mask)
        nheads = mask.kv_indices.shape[-3] if of_mask.is_by_head else 1
        given = _given(of_mask, Entries(of_mask.batch, nheads))
        if of_mask.slices.bits is None or of_mask.watched is None or not reached.is_unchanged():
            return Made(given, None)
        lists = [x for x in (getattr(mask, name) for name in BlockLists._fields) if x is not None]
        return Made(given, [*of_mask.watched, *lists], reached.is_unchanged)

    return _evaluated.get((mask,), (), convert, torch.device("cpu"))


def _given(of_mask: Converted, entries: Entries) -> _Given:
    unknown = "b" if of_mask.is_of_entry and entries.batch == 1 else ""
    unknown += "h" if of_mask.is_of_head and entries.heads == 1 else ""
    return _Given(Cover.of(of_mask.slices, entries), unknown)


# Of a group, by how many ranks share heads: those of attention, and those that share heads.
_groups: WeakKeyDictionary[
    dist.ProcessGroup, dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]]
] = WeakKeyDictionary()


def groups_of(mesh: Any, head_ranks: int = 1) -> RankGroups:
    """The ranks of a mesh of one dimension or of a process group, of which so many neighbours share heads. All of them
    make the groups of those together, the first time."""
    group = group_of(mesh)
    if head_ranks == 1:
        return RankGroups(group, group)
    made = _groups.setdefault(group, {})
    if head_ranks not in made:
        ranks, number, rank = dist.get_process_group_ranks(group), group.size(), group.rank()
        _check_divides(number, head_ranks)
        if ranks != sorted(ranks):
            raise ValueError(
                f"`mesh` must have its ranks in ascending order where they share heads (`head_ranks`), got {ranks}"
            )
        require_equal_groups(head_ranks, group)
        first, place = rank - rank % head_ranks, rank % head_ranks
        parts = (ranks[first : first + head_ranks], ranks[place::head_ranks])
        options: dict[str, Any] = {
            "backend": dist.get_backend_config(group),
            "timeout": _compat.timeout_of(group),
            "use_local_synchronization": True,  # others need not call it
        }
        heads, attention = (dist.new_group(x, **options) for x in parts)
        made[head_ranks] = attention, heads
    attention, heads = made[head_ranks]
    return RankGroups(attention, group, heads)


def _check_divides(number: int, head_ranks: int) -> None:
    if number % head_ranks:
        raise ValueError(
            f"`head_ranks` of ContextParallelOptions must divide the {number} ranks of `mesh` or `ranks`, got "
            f"{head_ranks}"
        )


def group_of(mesh: Any) -> dist.ProcessGroup:
    """The ranks of a mesh of one dimension, or of a process group."""
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            "`mesh` must be a DeviceMesh or a process group of which this process is a member, got "
            f"{type(mesh).__name__}"
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
