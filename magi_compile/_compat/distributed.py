"""Process groups, memory that GPUs share, and PyTorch's own context parallelism."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def resolve_process_group(name: str, argument: str = "group") -> Any:
    """The process group called `name` (`ProcessGroup.group_name`); how ops name groups in a graph."""
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(
            f"`{argument}` must be a process group of this process or the name of one, got {name!r}"
        ) from error


def default_group_name() -> str:
    """The name of the default process group, also while a graph is traced."""
    return torch.distributed.distributed_c10d._get_default_group().group_name


def store_of(group: Any) -> Any:
    """The store of a process group, with keys of its own."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def number_of_groups() -> int:
    """The process groups that this rank has; PyTorch names by it those that their members alone make."""
    return len(torch.distributed.distributed_c10d._world.pg_names)


def own_store_of(group: Any) -> Any:
    """`store_of` with a connection of its own, if PyTorch can make one: calls of other threads do not hold it up."""
    store = store_of(group)
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # of this PyTorch, or of somebody else's store
        return store


def timeout_of(group: Any, device: torch.device | None = None) -> datetime.timedelta:
    """The timeout of a process group: of its backend for `device`, or of one of its backends; PyTorch's default where
    that has none, as "fake" and what others wrote may not."""
    device = group._device_types[0] if device is None else device
    try:
        return group._get_backend(device).options._timeout  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        return torch.distributed.constants.default_pg_timeout


def timeout_reader(group: Any) -> Callable[[], datetime.timedelta]:
    """Reads `timeout_of(group)`, which may change. To find the options of a backend takes a millisecond, to read them
    nothing."""
    try:
        options = group._get_backend(group._device_types[0]).options
        options._timeout  # noqa: B018
    except (AttributeError, RuntimeError):
        return lambda: timeout_of(group)
    return lambda: cast(datetime.timedelta, options._timeout)


def symmetric_empty(num_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised uint8 memory of a GPU that `symmetric_rendezvous` can share with peers."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)


def symmetric_rendezvous(memory: Tensor, group_name: str) -> Any:
    """Shares `memory` of `symmetric_empty` among the ranks of a group, which call this together with equal sizes.

    Returns when all ranks have called; peers' memory stays mapped while the result lives.
    """
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(memory, group_name)  # type: ignore[arg-type]


def symmetric_addresses(rendezvous: Any) -> list[int]:
    """The addresses, in this process, of the memory of each rank of a rendezvous."""
    ranks = range(rendezvous.world_size)
    return [rendezvous.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in ranks]


#: What PyTorch calls the permutation of a load balancer, through which a mask_mod of its context parallelism looks up
#: tokens.
PERMUTED_TOKENS = "qkv_rearrange_indices"


def indices_of_load_balancer(balancer: Any) -> Any:
    """The order in which a load balancer of PyTorch's or torchtitan's context parallelism puts tokens; None for other
    objects."""
    for name in ("generate_permutation", "_generate_indices"):
        generate = getattr(balancer, name, None)
        if generate is not None:
            return generate()
    return None


def context_parallel_style_of_torch() -> Any:
    """PyTorch's own style of context parallelism for modules that call FlexAttention with `(query, key, value, ...)`:
    keys and values `[B, H, S, D]` are gathered, gradients are reduced and scattered. For `parallelize_module`."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _ContextParallel

    return _ContextParallel(2, _ContextParallel.AttentionType.FLEX)


def block_mask_of_torch_rank(mesh: Any, block_mask: Any, balancer: Any) -> Any:
    """The BlockMask of this rank's queries and all keys, which goes with `context_parallel_style_of_torch`. Tokens are
    spread by `balancer`, which is one of `load_balancer_of_torch` or None for the order of the sequence.

    PyTorch compiles what evaluates the mask, and at 16K tokens the assembler takes minutes; eager code gives the
    same."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    with torch.compiler.set_stance("force_eager"):
        (local,) = _attention._context_parallel_shard(mesh, [block_mask], [0], balancer)
    return local


def load_balancer_of_torch(name: str, *arguments: Any) -> Any:
    """A load balancer of PyTorch's context parallelism, by the name of its class."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer

    return getattr(_load_balancer, f"_{name}LoadBalancer")(*arguments)
