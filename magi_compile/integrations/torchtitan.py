"""torchtitan 0.3: FlexAttention of its models on our kernels, and context parallelism for any mask.

    --override.imports magi_compile.integrations.torchtitan.magi     on the command line, or in a recipe:
    use_magi(config)

torchtitan then builds `MagiAttention` in place of its FlexAttention. A model asks for its masks as before; instead of a
BlockMask it gets the slices of its mask_mods, made once for each batch, in tensors whose shapes are the same in every
step. Under context parallelism the tokens of a batch are spread over ranks by the masks of all layers, and a layer gets
a `SequencePlan`.

Five functions of torchtitan are replaced for that, at the first use of the override. They do what they did before
wherever `MagiAttention` is not.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import and_masks
from torch.utils.weak import WeakTensorKeyDictionary

from magi_compile._compat import version_of
from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions
from magi_compile.dtensor.sequence.make_plan import plan
from magi_compile.dtensor.sequence.sequence_plan import SequencePlan
from magi_compile.kernels.heuristics import slice_capacity
from magi_compile.masks import AttnSlices
from magi_compile.masks.program.read import trace_mask_mod
from magi_compile.ops.attention import flex_flash_attention

TESTED = ((0, 3), (0, 4))  # from the first to below the second


def _check_version() -> None:
    try:
        found = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    numbers = tuple(int(x) if x.isdigit() else -1 for x in found.split(".")[:2])
    if not TESTED[0] <= numbers < TESTED[1]:
        raise ImportError(
            f"magi_compile.integrations.torchtitan needs torchtitan 0.3, got {found}: "
            'pip install ".[torchtitan]" in a clone of magi_compile'
        )


_check_version()
try:
    import spmd_types as spmd
    from spmd_types.runtime import get_partition_spec
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.config import derive, override
    from torchtitan.distributed import cudagraph
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.distributed.context_parallel import api as context_parallel
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.module import Module
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise ImportError(
        f"torchtitan 0.3 needs PyTorch 2.14 or later, got {torch.__version__}: {error}"
    ) from error

NAME = f"{__name__}.magi"
LAYERS = ".attention.inner_attention"  # how the names of what is replaced end


# Masks


class MaskSlices(NamedTuple):
    """The slices of a mask, over the packed rows of all batch entries: what a layer gets without context parallelism.

    Tensors alone, so that CUDA graphs can copy it and FSDP passes it on.
    """

    q_ranges: Tensor  # int32 [capacity, 2]
    k_ranges: Tensor  # int32 [capacity, 2]
    mask_types: Tensor  # int32 [capacity]


class _Made(NamedTuple):
    """Facts about a mask beside its tensors."""

    slices: AttnSlices
    config: MagiAttention.Config


# By the first tensor of a MaskSlices, as long as that lives.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def make_mask(
    mask_mod: Callable[..., Tensor],
    batch: int,
    seqlen: int,
    device: torch.device,
    config: MagiAttention.Config,
) -> MaskSlices:
    """The slices of a mask_mod, of a fixed capacity. On a GPU nothing waits; data that breaks the mask raises
    `MaskDataError` later.

    There are `batch` entries of `seqlen` tokens. The `slice_capacity` of `config`, the attention that asks, bounds the
    slices. Raises UnsupportedMaskError where slices cannot express the mask.
    """
    program, tables, _ = trace_mask_mod(mask_mod, device)
    capacity = config.slice_capacity
    if capacity is None:
        most = program.max_intervals(seqlen, ())
        capacity = slice_capacity(seqlen, most, by_keys=program.by_keys)
    sizes = (batch, seqlen, seqlen, capacity * batch)
    lists = MaskSlices(
        *torch.ops.magi.mask_slices(tables, (), program.text, *sizes, device, [], [])
    )
    _made[lists.q_ranges] = _Made(_unchecked(lists, batch * seqlen), config)
    return lists


def _unchecked(mask: MaskSlices, rows: int) -> AttnSlices:
    return AttnSlices.unchecked(mask.q_ranges, mask.k_ranges, mask.mask_types, rows, rows)


def _slices_of(mask: MaskSlices, rows: int) -> AttnSlices:
    """The same object for all layers of a step in eager code, so that they share a plan."""
    if not torch.compiler.is_compiling() and mask.q_ranges in _made:
        return _made[mask.q_ranges].slices
    return _unchecked(mask, rows)


# The module


class MagiAttention(Module):
    """The module that torchtitan builds in place of its FlexAttention."""

    # A FlexAttention.Config, so that models make masks for it. The module is none: those are held to Inductor.
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        chunk_size: int | None = None
        """Tokens that stay together under context parallelism; None chooses by the masks."""

        head_ranks: int = 1
        """How many neighbouring ranks share heads under context parallelism."""

        weights: dict[str, int] | None = None
        """How many layers have each mask of a model with several, by name; None stands for equally many."""

        slice_capacity: int | None = None
        """How many slices a mask may have for each batch entry; None stands for one for every 16 tokens,
        and at least 256."""

        varlen_window: tuple[int, int] | None = None
        """The window of the VarlenAttention that this stands for."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    # torchtitan finds the layouts of the first three arguments by their names.
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: MaskSlices | SequencePlan,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Attention of this rank's tokens.

        Args:
            q_BLNH: `[B, L, N, H]`.
            k_BLNH: `[B, L, N, H]`, with a divisor of the heads.
            v_BLNH: `[B, L, N, Hv]`.
            attention_masks: what `make_mask` made, or the plan of this rank.
            scale: factor of the scores; None stands for `H ** -0.5`.
            enable_gqa: changes nothing.
            out_transform: gets out `[B, L, N, Hv]` and lse `[B, L, N]`, and returns the output.
            **others: must be None.

        Returns:
            `[B, L, N, Hv]`.
        """
        for name, given in others.items():
            if given is not None:
                raise NotImplementedError(
                    f"{NAME} has no `{name}`; leave this model on its own attention"
                )
        with spmd.no_typecheck():
            q, k, v = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
            out, lse = _attend(q, k, v, attention_masks, scale)
            out_BLNH = out.view(*q_BLNH.shape[:3], v_BLNH.shape[3])
        local, spec = _types_of(q_BLNH)
        _assert_types(out_BLNH, local, spec)
        if out_transform is None:
            return out_BLNH
        with spmd.no_typecheck():
            lse_BLN = lse.transpose(0, 1).reshape(q_BLNH.shape[:3])
        _assert_types(lse_BLN, local, None if spec is None else spmd.PartitionSpec(*spec[:-1]))
        return out_transform(out_BLNH, lse_BLN)


# torchtitan checks layouts on request. It does not look into attention, which says what comes out.


def _types_of(x: Tensor) -> tuple[Any, Any]:
    is_checked = spmd.is_type_checking()
    return (spmd.get_local_type(x), get_partition_spec(x)) if is_checked else (None, None)


def _assert_types(x: Tensor, local: Any, spec: Any) -> None:
    if spmd.is_type_checking():
        spmd.assert_type(x, local, spec)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskSlices | SequencePlan, scale: float | None
) -> tuple[Tensor, Tensor]:
    """`(out [T, N, H], lse [N, T])` of packed tokens."""
    if isinstance(mask, SequencePlan):
        return mask.attention(q, k, v, scale=scale, return_lse=True)
    if isinstance(mask, MaskSlices):
        slices = _slices_of(mask, q.shape[0])
        out, lse, _ = flex_flash_attention(q, k, v, slices, softmax_scale=scale)
        return out, lse
    raise NotImplementedError(
        f"{NAME} needs a model that makes its masks by Decoder._create_flex_attention_mask (Llama 3, Qwen 3, gpt-oss, "
        f"DeepSeek-V3), got a mask of type {type(mask).__name__}"
    )


# The doors


@override(
    target=FlexAttention.Config,
    fqns=[f"*{LAYERS}"],
    description="FlexAttention on the kernels of magi_compile",
)
def magi(
    cfg: FlexAttention.Config,
    *,
    chunk_size: int | None = None,
    head_ranks: int = 1,
    weights: dict[str, int] | None = None,
    slice_capacity: int | None = None,
) -> MagiAttention.Config:
    """The override: `--override.imports magi_compile.integrations.torchtitan.magi`.

    Args:
        cfg: the attention of a layer.
        chunk_size: tokens that stay together under context parallelism; None chooses by the masks.
        head_ranks: how many neighbouring ranks share heads under context parallelism, as in `ContextParallelOptions`;
            a divisor of the ranks and of the query heads that tensor parallelism leaves a rank.
        weights: how many layers have each mask of a model with several, by name, for their balance under context
            parallelism; None stands for equally many.
        slice_capacity: how many slices a mask may have for each batch entry; None stands for one for every 16 tokens,
            and at least 256.

    Returns:
        The attention that is built in its place.
    """
    _install()
    return derive(
        cfg,
        MagiAttention.Config,
        chunk_size=chunk_size,
        head_ranks=head_ranks,
        weights=weights,
        slice_capacity=slice_capacity,
        sharding_config=_without_gather(cfg.sharding_config),
    )


@override(
    target=VarlenAttention.Config,
    fqns=[f"*{LAYERS}"],
    description="varlen attention on the kernels of magi_compile",
)
def magi_varlen(cfg: VarlenAttention.Config, **options: Any) -> MagiAttention.Config:
    """The same where a model is built with `attn_backend="varlen"`, as gpt-oss is by default.

    Args:
        cfg: the attention of a layer; its window must be the model's as well.
        **options: those of `magi`.

    Returns:
        The config that is built in its place.
    """
    return replace(magi(cfg, **options), varlen_window=cfg.window_size)


_OVERRIDES = {FlexAttention.Config: magi, VarlenAttention.Config: magi_varlen}


def use_magi(config: Trainer.Config, **options: Any) -> Trainer.Config:
    """The same for a recipe: attention of `config` runs on our kernels.

    Args:
        config: of a model with FlexAttention or varlen attention, before the Trainer is built.
        **options: those of `magi`.

    Returns:
        `config`, changed in place.

    Raises:
        ValueError: there is no such attention in the model.
        TypeError: an option does not exist.
    """
    known = list(magi.__kwdefaults__)
    for name, given in options.items():
        if name not in known:
            raise TypeError(
                f"`use_magi` must get no other options than {', '.join(known)}, got {name}={given!r}"
            )
    spec = config.model_spec
    wanted = [
        f"{__name__}.{door.__name__}"
        for kind, door in _OVERRIDES.items()
        if spec and any(name.endswith(LAYERS) for name, *_ in spec.model.traverse(kind))
    ]
    if not wanted:
        raise ValueError(
            "`config` must have a model whose layers have FlexAttention or VarlenAttention, "
            f"got {None if spec is None else f'{spec.name} {spec.flavor}'}"
        )
    added = [(name, options) if options else name for name in wanted]
    config.override.imports = [*config.override.imports, *added]
    return config


def _without_gather(sharding: Any) -> Any:
    """The layouts of attention whose keys and values stay where they are: it communicates itself."""
    if sharding is None or not sharding.in_src_shardings:
        return sharding
    layouts = dict(sharding.in_src_shardings)
    local_map = sharding.local_map
    if local_map is not None:
        local_map = replace(local_map, in_grad_placements=tuple(layouts.values()))
    return replace(sharding, in_dst_shardings=layouts, local_map=local_map)


# What is replaced in torchtitan


@cache
def _install() -> None:
    Decoder._create_flex_attention_mask = _with_our_masks(Decoder._create_flex_attention_mask)
    context_parallel.cp_shard = _with_our_plans(context_parallel.cp_shard)
    Trainer.batch_generator = _with_plans_of_batches(Trainer.batch_generator)
    Trainer.post_dataloading_process = _with_its_plan(Trainer.post_dataloading_process)
    SelectiveAC.get_save_ops = _with_our_outputs(SelectiveAC.get_save_ops)


def _with_our_masks(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def create_flex_attention_mask(
        self: Decoder, positions: Tensor, attn_config: Any, mask_mods: Sequence[Any]
    ) -> Any:
        config = attn_config.inner_attention
        if not isinstance(config, MagiAttention.Config):
            return theirs(self, positions, attn_config, mask_mods)
        _check_layers(self)
        if _this_batch.get() is not None:
            return _PLANNED
        batch, seqlen = positions.shape
        return make_mask(and_masks(*mask_mods), batch, seqlen, positions.device, config)

    return create_flex_attention_mask


def _check_layers(model: Decoder) -> None:
    """Refuses layers about which the masks of the model do not say everything."""
    for number, layer in enumerate(model.config.layers):
        if layer.attention is None:
            raise NotImplementedError(
                f"{NAME} needs a model whose layers all have attention, got {type(model).__name__}, in "
                f"which layer {number} has another kind; leave this model on its own attention"
            )
        given = getattr(layer.attention.inner_attention, "varlen_window", None)
        window = getattr(layer.attention, "sliding_window_size", None)
        made = (-1 if window is None else window - 1, 0)
        if given is not None and given != made:
            raise NotImplementedError(
                f"`window_size` of the VarlenAttention in layer {number} must be that of the model's "
                f"mask, {made}, got {given}"
            )


def _with_our_outputs(theirs: Callable[..., set[Any]]) -> Callable[..., set[Any]]:
    """Saves attention and its plan, so that the backward does not compute them again."""
    ops = torch.ops.magi
    ours = {
        ops.plan.default,
        ops.plan_lists.default,
        ops.ffa_fwd.default,
        ops.cp_ffa_fwd.default,
        ops.cp_exchange_heads.default,
    }

    @wraps(theirs)
    def get_save_ops(self: SelectiveAC) -> set[Any]:
        return theirs(self) | ours

    return get_save_ops


def _with_our_plans(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def cp_shard(
        cp_mesh: DeviceMesh,
        inputs: tuple[Tensor, ...],
        attention_masks: Any,
        load_balancer_type: str | None = "headtail",
        *rest: Any,
        **others: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        is_one = not isinstance(attention_masks, Mapping)
        masks = {"mask": attention_masks} if is_one else attention_masks
        plans = _this_batch.get()
        if plans is None:
            if not any(isinstance(mask, MaskSlices) for mask in masks.values()):
                return theirs(cp_mesh, inputs, attention_masks, load_balancer_type, *rest, **others)
            plans = _plans_of(cp_mesh, masks, load_balancer_type)
        first = next(iter(plans.values()))
        fill = (0, IGNORE_INDEX, 0)  # of tokens, labels and positions
        local = tuple(
            first.shard(x.flatten(0, 1), 0, padding=padding).unsqueeze(0)
            for x, padding in zip(inputs, fill, strict=True)
        )
        return local, first if is_one else plans

    return cp_shard


# Batches are on the host when torchtitan takes them from its loader, while the GPU runs the step before. Planned there,
# a plan costs the step nothing; behind their way to the GPU, for which torchtitan waits, it would cost all it takes.

Plans: TypeAlias = "dict[str, SequencePlan]"

_PLANNED = object()  # in place of a mask that has its plan
_this_batch: ContextVar[Plans | None] = ContextVar("this_batch", default=None)


#: The way of a batch through a trainer. Torchtitan's own does nothing to it there but take it to the GPU.
_WAY = (
    "train",
    "batch_generator",
    "train_step",
    "forward_backward_step",
    "pp_forward_backward_step",
    "post_dataloading_process",
)


class _Planned(NamedTuple):
    """The plans of a batch that torchtitan has taken, and not yet used."""

    batch: dict[str, Any]
    positions: Tensor
    version: int
    plans: Plans

    @property
    def is_valid(self) -> bool:
        """False if the batch has got other positions since, or there are others in their tensor."""
        now = self.batch.get("positions")
        if not isinstance(now, Tensor) or self.version != version_of(self.positions):
            return False
        # A comparison on the GPU would hold up the host.
        is_there = now.device.type != "cpu" or now is self.positions
        return is_there or torch.equal(now, self.positions)


# Of each trainer, by the id of the batch, which is kept.
_planned: WeakKeyDictionary[Trainer, dict[int, _Planned]] = WeakKeyDictionary()
MOST_PLANNED = 1024  # of a trainer that never uses them


def _with_plans_of_batches(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def batch_generator(self: Trainer, data_iterable: Any) -> Iterator[Any]:
        for batch, labels in theirs(self, data_iterable):
            plans = _plans_of_batch(self, batch)
            if plans is not None:
                planned = _planned.setdefault(self, {})
                if len(planned) >= MOST_PLANNED:
                    planned.clear()
                positions = batch["positions"]
                planned[id(batch)] = _Planned(batch, positions, version_of(positions), plans)
            yield batch, labels

    return batch_generator


def _plans_of_batch(trainer: Trainer, batch: Any) -> Plans | None:
    """Plans by positions on the host; None where torchtitan makes no masks of ours, or not for several ranks, or where
    a trainer of the user's may give the batch other positions on its way."""
    positions = batch.get("positions") if isinstance(batch, dict) else None
    if not trainer.parallel_dims.cp_enabled or positions is None or positions.device.type != "cpu":
        return None
    first = getattr(trainer.model_config, "first_attention", None)
    if not isinstance(getattr(first, "inner_attention", None), MagiAttention.Config):
        return None
    methods = (getattr(getattr(trainer, name), "__func__", None) for name in _WAY)
    if any(
        method is not getattr(Trainer, name) for name, method in zip(_WAY, methods, strict=True)
    ):
        return None
    try:
        masks = trainer.model_parts[0].get_attention_masks(positions=positions)
    except (
        Exception
    ):  # of a model that takes positions on its GPU alone; others come again in the step
        return None
    masks = masks if isinstance(masks, Mapping) else {"mask": masks}
    if not all(isinstance(mask, MaskSlices) for mask in masks.values()):
        return None
    balancer = trainer.config.parallelism.context_parallel_load_balancer
    return _plans_of(trainer.parallel_dims.get_mesh("cp"), masks, balancer)


def _with_its_plan(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def post_dataloading_process(self: Trainer, batch: Any, *rest: Any, **others: Any) -> Any:
        planned = _planned.get(self, {}).pop(id(batch), None)
        token = _this_batch.set(planned.plans if planned and planned.is_valid else None)
        try:
            return theirs(self, batch, *rest, **others)
        finally:
            _this_batch.reset(token)

    return post_dataloading_process


def _plans_of(
    cp_mesh: DeviceMesh, masks: Mapping[str, MaskSlices], load_balancer: str | None
) -> dict[str, SequencePlan]:
    """This rank's plan for each mask of a batch, whose entries are packed one behind the other."""
    if cudagraph._manager._wrappers:
        raise ValueError(
            "context parallelism makes a plan on the host in each step, which CUDA graphs cannot replay: "
            "set `training.disable_cuda_graphs` (--training.disable_cuda_graphs), got False"
        )
    if load_balancer not in ("headtail", None):
        raise ValueError(
            "`parallelism.context_parallel_load_balancer` must be 'headtail', the default, which "
            f"stands for the balance of magi_compile here, or None for contiguous parts, got {load_balancer!r}"
        )
    made = {name: _made[mask.q_ranges] for name, mask in masks.items()}
    whole = {name: mask.slices.to("cpu").compact() for name, mask in made.items()}
    config, total = next((x.config, x.slices.seqlen_q) for x in made.values())
    return plan(
        masks=whole,
        weights=config.weights,
        mesh=cp_mesh,
        options=ContextParallelOptions(chunk_size=config.chunk_size, head_ranks=config.head_ranks),
        permutation=torch.arange(total, device="cpu") if load_balancer is None else None,
    )
