"""Context parallelism for Hugging Face's Trainer, the trainers that inherit from it (TRL's SFTTrainer), and loops of
accelerate's, by one line.

    from magi_compile.integrations.trainer import context_parallel

    context_parallel(trainer, cp_size=8)  # before trainer.train()

    ranks = context_parallel(accelerator, model, cp_size=8)  # before accelerator.prepare
    loss = model(**ranks.shard(batch)).loss

The model's inputs are cut, and its masks carry their plans: see `sharded_batches`. Weights and gradients are left to
DDP or FSDP2, over all ranks.
"""

# All that touches private or undocumented names of the frameworks is in this file. Read in transformers 5.20 to 5.24,
# accelerate 1.13 to 1.15 and TRL 1.14 to 1.16:
#
#   accelerate      `AcceleratedScheduler.step`          steps once for each process; here for each group
#                   `Accelerator._prepare_device_mesh`   asked by `prepare_data_loader` only, which divides the ranks by
#                                                        `cp`, so that the ranks of a group get the same batches
#                   `Accelerator._prepare_cp`            would put a causal mask in place of every other, or refuse
#   transformers    `Trainer.get_cp_size`                divides the count of labels and the batch size
#                   `Trainer._prepare_context_parallel_inputs`  would cut batches as well, or refuse
#                   `Trainer._get_num_items_in_batch`    not changed, but relied upon: labels over all ranks / cp
#                   `Trainer.gather_function`            set for a loop; `evaluation_loop` puts its own back
#                   `Trainer._track_num_input_tokens`    counts on every rank
#                   `PreTrainedModel._is_stateful`, `.loss_type`, `config._attn_implementation`

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer

from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions
from magi_compile.dtensor.ranks.agreement import require_equal_tokens
from magi_compile.integrations.sharded_batches import (
    CHANGING_ROPES,
    COUNT,
    IGNORED,
    LONGEST,
    MASKS,
    PLAN,
    BatchPlanner,
    Exact,
    PlannedBatch,
    PlanningCollator,
    ShardedBatch,
    check_sizes,
    rope_types,
    shifted_labels,
)
from magi_compile.integrations.transformers import NAME
from magi_compile.masks.arguments import check_count

DEFAULTS = ContextParallelOptions()
_NO_PLAN = -1  # what a rank says in place of a checksum
# Names of `loss_type` that shift labels.
_CAUSAL_LOSSES = ("ForCausalLM", "ForConditionalGeneration")


def context_parallel(
    trainer_or_accelerator: Any,
    model: Any = None,
    *,
    cp_size: int | None = None,
    options: ContextParallelOptions = DEFAULTS,
) -> Any:
    """Spreads every sequence of a training over `cp_size` neighbouring ranks; losses stay those of one process.

    The model's attention becomes `"magi"`. Packed and padded batches, windows and sinks run as they are. All ranks call
    it, before `train`, `evaluate` and `accelerator.prepare`.

    Args:
        trainer_or_accelerator: a Trainer, whose class becomes a subclass of its own, or an Accelerator.
        model: of transformers or PEFT, with an Accelerator; a Trainer has its own.
        cp_size: the ranks that share a sequence, which divide the number of processes; by default that of accelerate's
            `ParallelismConfig`.
        options: how to spread.

    Returns:
        The trainer, or the `ContextParallelRanks` of an Accelerator.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: `cp_size` does not fit the processes or the ParallelismConfig; a setting hands other batches to the
            ranks of a group, or counts labels of a rank only; something has been prepared already.
        NotImplementedError: a loss or a model that does not run over ranks; the message tells what to do.
    """
    if isinstance(trainer_or_accelerator, Accelerator):
        return ContextParallelRanks(trainer_or_accelerator, model, cp_size, options)
    trainer: Any = trainer_or_accelerator
    if not isinstance(trainer_or_accelerator, Trainer):
        raise TypeError(
            f"`trainer_or_accelerator` must be a Trainer or an Accelerator, got {type(trainer).__name__}"
        )
    if model is not None:
        raise ValueError("`model` must be None for a Trainer, which has one, got another")
    if getattr(trainer, "context_parallel_ranks", None) is not None:
        raise ValueError(
            "`trainer_or_accelerator` must not be context parallel already, got one that is"
        )
    _check_trainer(trainer)
    trainer.context_parallel_ranks = ContextParallelRanks(
        trainer.accelerator, trainer.model, cp_size, options
    )
    _warn_of_routers(trainer)
    # A subclass, not a wrapper: callbacks and trainers ask for the class. In front of all that the class overrides.
    kind = type(trainer)
    trainer.__class__ = type(f"ContextParallel{kind.__name__}", (_Hooks, kind), {})
    return trainer


def _check_trainer(trainer: Any) -> None:
    """Refuses the settings whose numbers would be wrong."""
    args = trainer.args
    if trainer.model_init is not None:
        raise NotImplementedError(
            "`model_init` makes a new model in `train`, which is not spread over ranks; give the Trainer a `model`"
        )
    if getattr(args, "neftune_noise_alpha", None) is not None:
        raise NotImplementedError(
            "`neftune_noise_alpha` scales its noise by the tokens of a rank, a part of the sequence; leave it out"
        )
    losses = [
        x
        for x in type(trainer).__mro__
        if "compute_loss" in vars(x) and x.__module__.startswith("trl.")
    ]
    if others := [x.__name__ for x in losses if x.__name__ != "SFTTrainer"]:
        raise NotImplementedError(
            f"{others[0]} of TRL makes its loss of the logits of whole sequences, which are cut over ranks; only "
            "SFTTrainer and Trainer run over ranks"
        )
    if args.label_smoothing_factor or trainer.compute_loss_func is not None:
        name = "label_smoothing_factor" if args.label_smoothing_factor else "compute_loss_func"
        raise NotImplementedError(
            f"`{name}` makes a loss that shifts the labels of each rank by itself; leave it out, or override "
            "`compute_loss` as docs/trainer.md says"
        )
    if not trainer.model_accepts_loss_kwargs:
        raise NotImplementedError(
            "the model's forward must take `num_items_in_batch` (**kwargs): ranks have different numbers of labels, "
            "and a mean over ranks would be wrong; hand **kwargs on to `self.loss_function`"
        )
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        raise NotImplementedError(
            "`train_sampling_strategy='batch_rebalance'` gives every rank batches of its own; use 'random'"
        )
    if not args.average_tokens_across_devices:
        raise ValueError(
            "`average_tokens_across_devices` must be True to count the labels of all ranks, got False"
        )
    if args.eval_use_gather_object:
        raise NotImplementedError(
            "`eval_use_gather_object` gathers from every rank of a group; set it to False"
        )


class ContextParallelMixin:
    """A Trainer that takes `cp_size`: `class MyTrainer(ContextParallelMixin, Trainer)`.

    Methods of the class see this rank's tokens: `compute_loss` gets `[1, tokens of this rank]`, with `shift_labels`.

    Args:
        *args: the Trainer's.
        cp_size: as in `context_parallel`.
        options: as in `context_parallel`.
        **kwargs: the Trainer's.

    Attributes:
        context_parallel_ranks: the `ContextParallelRanks`.
    """

    context_parallel_ranks: ContextParallelRanks | None = None

    def __init__(
        self,
        *args: Any,
        cp_size: int | None = None,
        options: ContextParallelOptions = DEFAULTS,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        context_parallel(self, cp_size=cp_size, options=options)


class _Hooks:
    """The methods of a Trainer over ranks, in front of its class."""

    context_parallel_ranks: ContextParallelRanks | None = None
    _sharded: ShardedBatch | None = None  # the batch whose inputs the model had last
    _checked: frozenset[bool] = frozenset()  # losses of evaluation, of training
    # Of the Trainer behind it.
    args: Any
    accelerator: Any
    state: Any
    gather_function: Any

    def get_cp_size(self) -> int:
        """The ranks of a group, by which the Trainer divides labels and batch sizes counted over all ranks."""
        before: Any = super()
        return (
            before.get_cp_size()
            if self.context_parallel_ranks is None
            else self.context_parallel_ranks.cp_size
        )  # type: ignore[no-any-return]

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The Trainer's loss of this rank's tokens, to be averaged over all ranks.

        Without `num_items_in_batch` that average over the ranks of a group is the mean over their batch.
        """
        assert self.context_parallel_ranks is not None
        labels = shifted_labels(inputs)
        if num_items_in_batch is None and labels is not None:
            num_items_in_batch = (
                labels != IGNORED
            ).sum() * self.context_parallel_ranks.data_parallel_size
        self._sharded = self.context_parallel_ranks.sharded(inputs)
        inputs = self._sharded.inputs(inputs)
        if isinstance(num_items_in_batch, Tensor):
            inputs[COUNT] = Exact(num_items_in_batch)
        trainer: Any = super()
        found = trainer.compute_loss(
            model,
            inputs,
            return_outputs=return_outputs,
            num_items_in_batch=num_items_in_batch,
            **kwargs,
        )
        if model.training not in self._checked:
            self._checked |= {model.training}
            self.context_parallel_ranks.check_first(found[0] if return_outputs else found, labels)
        return found

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """The Trainer's, with the loss of the group and the logits `[B, S, V]` of all its tokens."""
        assert self.context_parallel_ranks is not None
        trainer: Any = super()
        self._sharded, local = None, inputs
        if "labels" not in inputs:  # the model is called without compute_loss
            self._sharded = self.context_parallel_ranks.sharded(inputs)
            local = self._sharded.inputs(trainer._prepare_inputs(inputs))
        loss, logits, labels = trainer.prediction_step(
            model, local, prediction_loss_only, ignore_keys
        )
        if loss is not None:
            loss = loss.clone()
            dist.all_reduce(loss, group=self.context_parallel_ranks.group)
            loss = loss / self.context_parallel_ranks.cp_size
        if logits is not None:
            logits = recursively_apply(self._unsharded, logits)
        return loss, logits, labels

    def _unsharded(self, x: Tensor) -> Tensor:
        assert self._sharded is not None
        rows = self._sharded.tokens.seqlen_local
        if x.shape[:2] != (1, rows):
            raise NotImplementedError(
                f"predictions must be of tokens, [1, {rows}, ...] on each rank, got shape {list(x.shape)}; name such "
                "outputs in `keys_to_ignore_at_inference` of the model's config, or set prediction_loss_only=True"
            )
        return self._sharded.unshard(x)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, in which each sample counts once, whatever the number of ranks that share it."""
        assert self.context_parallel_ranks is not None
        # The loop puts the usual one back.
        self.gather_function = self.context_parallel_ranks.gather_for_metrics
        trainer: Any = super()
        return trainer.evaluation_loop(*args, **kwargs)

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return nullcontext, inputs

    def _track_num_input_tokens(self, inputs: Any) -> None:
        assert self.context_parallel_ranks is not None
        trainer: Any = super()
        before = self.state.num_input_tokens_seen
        trainer._track_num_input_tokens(inputs)
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.context_parallel_ranks.copies


class ContextParallelRanks:
    """The ranks that share sequences, for what an Accelerator prepares. Made by `context_parallel`.

    Loaders that the Accelerator prepares from now on give all ranks of a group the same batches, with their plans.

    Args:
        accelerator: nothing must be prepared yet.
        model: of transformers or PEFT.
        cp_size: see `context_parallel`.
        options: see `context_parallel`.

    Attributes:
        cp_size: the ranks of a group.
        data_parallel_size: the groups, which have batches of their own.
        copies: the ranks that have one batch, those of tensor parallelism included.
        mesh: this rank's group, a mesh of one dimension.
        group: the same as a process group.
        planner: plans batches for this rank.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        cp_size: int | None = None,
        options: ContextParallelOptions = DEFAULTS,
    ):
        base = _base_of(model)
        _check_model(base)
        if not isinstance(options, ContextParallelOptions):
            raise TypeError(
                f"`options` must be ContextParallelOptions, got {type(options).__name__}"
            )
        mesh, tp_size, changes = _mesh_of(accelerator, cp_size)
        self.mesh, self.group, self.cp_size = mesh, mesh.get_group(), mesh.size()
        self.copies = self.cp_size * tp_size
        self.data_parallel_size = accelerator.num_processes // self.copies
        self._accelerator, self._tp_size, self._base = accelerator, tp_size, base
        self._has_looked = tp_size == 1
        _set_attention(base)
        self.planner = BatchPlanner(base.config, (self.cp_size, self.group.rank()), options)
        # Nothing is refused from here on: an Accelerator that was refused works as before.
        _take_masks(base)
        for change in changes:
            change()
        _plan_in_loaders(accelerator, self.planner, self.copies)
        _step_by_groups(accelerator, self.copies)

    def shard(self, batch: Mapping[str, Any], num_items: Any = None) -> dict[str, Any]:
        """The arguments of the model on this rank. All ranks of a group call it together, with the same batch.

        Its loss is this rank's part: averaged over all ranks, as DDP and FSDP do with gradients, it is the mean over
        the batches of all ranks.

        Args:
            batch: `input_ids` int `[B, S]`, and what else the model takes: `labels` (not shifted), `position_ids`,
                `attention_mask` of padding.
            num_items: the labels of all batches of the step, from `count`; by default those of this batch, which then
                waits for the other ranks.

        Returns:
            A dict of tensors `[1, tokens of this rank]`, masks, and `num_items_in_batch`.

        Raises:
            ValueError: on every rank, if the ranks of the group have different tokens; what does not fit in `batch`.
            NotImplementedError: `batch` has images, or padding between tokens.
        """
        inputs = self.sharded(batch).inputs(batch)
        if self._base.training and not self._has_looked:
            self._has_looked = True
            _warn_of_own_gradients(self._base, self._tp_size)
        if "shift_labels" in inputs:
            num_items = self.count(batch) if num_items is None else num_items
            num_items = num_items / (self._accelerator.num_processes // self._tp_size)
            inputs["num_items_in_batch"] = num_items
            if isinstance(num_items, Tensor):
                inputs[COUNT] = Exact(num_items)
        return inputs

    def sharded(self, batch: Mapping[str, Any]) -> ShardedBatch:
        """This rank's tokens of a batch, which also puts them together again (`unshard`). All ranks of a group call it
        together.

        Args:
            batch: as in `shard`; one that a prepared loader made has its plan, another one is planned here, which
                waits for its device. So is one that was shortened or padded since.

        Returns:
            The tokens. Errors are those of `shard`.
        """
        try:
            planned = self._planned(batch)
        except Exception:
            with suppress(ValueError, RuntimeError):  # the others hear of it
                require_equal_tokens(_NO_PLAN, self.group)
            raise
        require_equal_tokens(planned.checksum, self.group)
        return ShardedBatch(planned, self.mesh)

    def _planned(self, batch: Mapping[str, Any]) -> PlannedBatch:
        """The batch's own plan, if there is one for this model and for so many tokens."""
        planned = batch.get(PLAN) if isinstance(batch, Mapping) else None
        if planned is None or planned.key != self.planner.key or not planned.fits(batch):
            return self.planner.plan(batch)
        check_sizes(batch)
        return planned  # type: ignore[no-any-return]

    def count(self, *batches: Mapping[str, Any]) -> Tensor:
        """The labels in these batches of all ranks, those of a group once. All ranks call it together.

        Args:
            *batches: those of this rank in one step.

        Returns:
            fp32 scalar, on the device of the Accelerator.
        """
        device = self._accelerator.device
        number = torch.zeros((), dtype=torch.float32, device=device)
        for batch in batches:
            labels = shifted_labels(batch)
            if labels is not None:
                number += (labels != IGNORED).sum().to(device)
        dist.all_reduce(number)
        return number / self.copies

    def gather_for_metrics(self, x: Any) -> Any:
        """`Accelerator.gather_for_metrics` of one rank of each group: each sample once, without the remainder that
        `even_batches` adds."""
        accelerator, copies = self._accelerator, self.copies
        gather = accelerator.gather

        def first_of_each(x: Tensor) -> Tensor:
            return x.unflatten(0, (accelerator.num_processes, -1))[::copies].flatten(0, 1)

        accelerator.gather = lambda x: recursively_apply(first_of_each, gather(x))
        try:
            return accelerator.gather_for_metrics(x)
        finally:
            del accelerator.gather  # of the instance

    def check_first(self, loss: Tensor, labels: Tensor | None) -> None:
        """Raises RuntimeError, before the first step, for a model that has not taken its labels."""
        total = loss.detach().float().abs()
        dist.all_reduce(total, group=self.group)
        # A mean over no labels is nan.
        if (
            labels is not None
            and bool((labels != IGNORED).any())
            and not 0 < float(total) < float("inf")
        ):
            raise RuntimeError(
                f"the model's first loss is {float(total)}: it must count `shift_labels`, which are shifted before the "
                "sequence is cut, with `num_items_in_batch`; hand **kwargs on to `self.loss_function`"
            )


def _base_of(model: Any) -> Any:
    """The model of transformers in one of PEFT, or itself."""
    if hasattr(model, "get_base_model"):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise NotImplementedError(
                "PEFT's prompt learning puts tokens in front of every rank's; use LoRA or another method that adds "
                "weights"
            )
        model = model.get_base_model()
    if not hasattr(model, "base_model") or not hasattr(model, "set_attn_implementation"):
        raise TypeError(
            f"`model` must be a model of transformers or PEFT, got {type(model).__name__}"
        )
    return model


def _check_model(model: Any) -> None:
    name, config = type(model).__name__, model.config
    # A class of the user's may have a name that says no loss; it then has that of causal models.
    is_causal = model.loss_type in _CAUSAL_LOSSES or (not model.loss_type and model.can_generate())
    if getattr(config, "is_encoder_decoder", False) or not is_causal:
        raise NotImplementedError(
            f"`model` must be a causal language model, whose loss shifts the labels, got {name}; spread others with "
            "magi_compile.dtensor.context_parallel in a loop of your own"
        )
    if getattr(model, "_is_stateful", False):
        raise NotImplementedError(
            f"`model` must have attention only, got {name}, whose layers keep a state along the sequence, which does "
            "not cross ranks"
        )
    if not any(
        x.kind == Parameter.VAR_KEYWORD for x in signature(model.forward).parameters.values()
    ):
        raise NotImplementedError(
            f"the forward of `model` must take **kwargs and hand them on, got {name}: its loss must take "
            "`num_items_in_batch`, since ranks have different numbers of labels"
        )


def _set_attention(model: Any) -> None:
    if model.config.get_text_config()._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    if model.config.get_text_config()._attn_implementation != NAME:
        raise NotImplementedError(
            f"`model` must look up its attention by `attn_implementation`, got {type(model).__name__}, which "
            "runs its own"
        )


def _mesh_of(accelerator: Any, cp_size: int | None) -> tuple[Any, int, list[Callable[[], None]]]:
    """The mesh of this rank's group, the ranks of tensor parallelism, and changes of the accelerator that are to be
    made."""
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise NotImplementedError(
            f"context parallelism runs with DDP and FSDP, got {kind}; use FSDP2"
        )
    if accelerator._dataloaders or accelerator._models:
        raise ValueError(
            "`accelerator` must have prepared nothing yet, got one that has; call context_parallel first"
        )
    if accelerator.dataloader_config.dispatch_batches:
        raise ValueError(
            "`dispatch_batches` must be False, got True: one process would hand a batch of its own to each rank of a "
            "group"
        )
    # None stands for True with an IterableDataset.
    changes: list[Callable[[], None]] = [
        partial(setattr, accelerator.dataloader_config, "dispatch_batches", False)
    ]
    config, world = accelerator.parallelism_config, accelerator.num_processes
    has_cp = config is not None and config.cp_enabled
    if config is not None and config.sp_enabled:
        raise ValueError(
            f"`sp_size` of ParallelismConfig must be 1, got {config.sp_size}; use `cp_size`"
        )
    if cp_size is None and not has_cp:
        raise ValueError(
            "`cp_size` must be given, or be in accelerate's ParallelismConfig, got None"
        )
    if cp_size is not None:
        check_count("cp_size", cp_size, 1)
    if not dist.is_initialized():
        raise ValueError(
            "`cp_size` needs processes, as torchrun starts them, got one without a process group"
        )
    if has_cp:
        if cp_size not in (None, config.cp_size):
            raise ValueError(
                f"`cp_size` must be that of ParallelismConfig, {config.cp_size}, got {cp_size}"
            )
        if config.total_size != world:
            raise ValueError(
                f"the sizes of ParallelismConfig must multiply to the {world} processes, got {config.total_size}; set "
                "`dp_shard_size` too, or for a model of transformers' DistributedConfig leave out `cp_size` of "
                "ParallelismConfig, and give it here"
            )
        changes.append(partial(setattr, accelerator, "_prepare_cp", lambda *args: args))
        return accelerator.torch_device_mesh["cp"], config.tp_size, changes
    assert cp_size is not None
    tp_size = 1 if config is None else config.tp_size
    if world % (cp_size * tp_size):
        beside = f", {tp_size} of which split one model" if tp_size > 1 else ""
        raise ValueError(f"`cp_size` must divide the {world} processes{beside}, got {cp_size}")
    # Tensor parallelism is among neighbours, as accelerate and transformers have it.
    sizes, names = (world // (cp_size * tp_size), cp_size, tp_size), ("dp_replicate", "cp", "tp")
    mesh = dist.init_device_mesh(accelerator.device.type, sizes, mesh_dim_names=names)
    changes.append(partial(setattr, accelerator, "_prepare_device_mesh", lambda: mesh))
    return mesh["cp"], tp_size, changes


def _warn_of_routers(trainer: Any) -> None:
    """Trainer multiplies the whole loss by the number of processes, the auxiliary loss of routers too: says so."""
    config = trainer.accelerator.unwrap_model(trainer.model).config
    adds_up = getattr(config, "output_router_logits", False) and getattr(
        config, "router_aux_loss_coef", 0
    )
    if adds_up and type(trainer).compute_loss is Trainer.compute_loss:
        number = trainer.accelerator.num_processes
        warnings.warn(
            f"Trainer adds the auxiliary loss of routers up over all {number} processes, as without context "
            f"parallelism: divide `router_aux_loss_coef` of the config, {config.router_aux_loss_coef}, by them",
            stacklevel=3,
        )


def _warn_of_own_gradients(model: torch.nn.Module, tp_size: int) -> None:
    """Beside tensor parallelism of `tp_size` accelerate uses no DDP: says so if FSDP2 does not average gradients."""
    sizes = (x.device_mesh.size() for x in model.parameters() if isinstance(x, DTensor))
    if not any(size > tp_size for size in sizes):
        warnings.warn(
            f"tensor parallelism of {tp_size} without FSDP2 (`fully_shard`) leaves the gradients of each rank of "
            "context and data parallelism as they are: average them, or shard the weights over these ranks",
            stacklevel=3,
        )


def _take_masks(model: Any) -> None:
    """Lets the decoder have its masks from the argument `MASKS`, once for all trainers of the model. What is around a
    decoder takes an `attention_mask` for one of padding: the loss of routers reads its shape, SFTTrainer counts its
    tokens."""
    decoder = model.base_model
    if hasattr(decoder, "_magi_took_masks"):
        return
    decoder._magi_took_masks = False
    decoder.register_forward_pre_hook(_give_masks, with_kwargs=True)
    if rope_types(model.config.get_text_config()) & CHANGING_ROPES:
        for rotary in _rotaries(decoder):
            rotary._magi_longest = None
            rotary.register_forward_pre_hook(_with_longest, with_kwargs=True)
            rotary.register_forward_hook(_without_longest)
    if decoder is not model:
        model.register_forward_pre_hook(_expect_masks, with_kwargs=True)
        model.register_forward_hook(_require_masks, with_kwargs=True)


def _rotaries(decoder: Any) -> list[Any]:
    """The modules that make rotary embeddings; they are right below a decoder."""
    return [x for x in decoder.children() if hasattr(x, "rope_type")]


def _with_longest(rotary: Any, args: Any, kwargs: Any) -> Any:
    """One more position, the longest of the whole batch: what looks at the longest one finds it on every rank."""
    if rotary._magi_longest is None:
        return args, kwargs
    is_named = "position_ids" in kwargs
    positions = kwargs["position_ids"] if is_named else args[1]
    longest = rotary._magi_longest.to(positions).expand(*positions.shape[:-1], 1)
    positions = torch.cat([positions, longest], -1)
    if is_named:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


def _without_longest(rotary: Any, args: Any, out: Any) -> Any:
    if rotary._magi_longest is None:
        return out
    return out[:, :-1] if isinstance(out, Tensor) else tuple(x[:, :-1] for x in out)


def _give_masks(decoder: Any, args: Any, kwargs: Any) -> Any:
    masks, longest = kwargs.pop(MASKS, None), kwargs.pop(LONGEST, None)
    for rotary in _rotaries(decoder):
        rotary._magi_longest = longest
    _restore_count(kwargs)
    if masks is None:
        return args, kwargs
    decoder._magi_took_masks = True
    return args, {**kwargs, "attention_mask": masks}


def _expect_masks(model: Any, args: Any, kwargs: Any) -> Any:
    model.base_model._magi_took_masks = False
    _restore_count(kwargs)
    return args, kwargs


def _restore_count(kwargs: dict[str, Any]) -> None:
    """Gives a model the number of labels that FSDP2 has cast to the dtype of its weights: 1022 is 1024 in bfloat16. A
    count of the user's own stays."""
    exact, count = kwargs.pop(COUNT, None), kwargs.get("num_items_in_batch")
    if exact is None or not isinstance(count, Tensor) or count.dtype == exact.value.dtype:
        return
    value = exact.value.to(count.device)
    kwargs["num_items_in_batch"] = torch.where(value.to(count.dtype) == count, value, count)


def _require_masks(model: Any, args: Any, kwargs: Any, output: Any) -> None:
    if MASKS in kwargs and not model.base_model._magi_took_masks:
        raise RuntimeError(
            f"the model's decoder has not got the masks of the sequence: forward must hand **kwargs ({MASKS!r} among "
            "them) on to `model.base_model`"
        )


def _plan_in_loaders(accelerator: Any, planner: BatchPlanner, copies: int) -> None:
    prepare = accelerator.prepare_data_loader

    def prepare_data_loader(data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data_loader.collate_fn, PlanningCollator):
            data_loader = copy.copy(data_loader)  # the caller's own stays as it is
            data_loader.collate_fn = PlanningCollator(data_loader.collate_fn, planner)
        seed = data_loader.worker_init_fn
        if isinstance(seed, partial) and "rank" in seed.keywords:
            # Trainer's: workers of a group must draw alike.
            of_group = {**seed.keywords, "rank": accelerator.process_index // copies}
            data_loader.worker_init_fn = partial(seed.func, *seed.args, **of_group)
        return prepare(data_loader, *args, **kwargs)

    accelerator.prepare_data_loader = prepare_data_loader


class _GroupScheduler(AcceleratedScheduler):
    """A scheduler of accelerate's that steps once for each group, which is as often as batches are taken."""

    copies = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        is_alone = self.split_batches or not self.step_with_optimizer
        is_skipped = any(optimizer.step_was_skipped for optimizer in self.optimizers)
        if is_alone or is_skipped or not self.gradient_state.sync_gradients:
            return super().step(*args, **kwargs)
        for _ in range(AcceleratorState().num_processes // self.copies):
            last = getattr(self.scheduler, "total_steps", None)  # OneCycleLR goes no further
            if last is None or self.scheduler._step_count <= last:
                self.scheduler.step(*args, **kwargs)


def _step_by_groups(accelerator: Any, copies: int) -> None:
    prepare = accelerator.prepare_scheduler

    def prepare_scheduler(scheduler: Any) -> Any:
        prepared = prepare(scheduler)
        prepared.__class__, prepared.copies = _GroupScheduler, copies
        return prepared

    accelerator.prepare_scheduler = prepare_scheduler
