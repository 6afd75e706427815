"""Batches of Hugging Face's over the ranks of a group: planned on the CPU where batches are made, in a worker of the
DataLoader for example, and cut where the model is called.

Rows of a batch become documents of one sequence, without their padding. The masks that the model gets carry their
plans, so attention needs no context around forward and backward, nor where checkpoints run layers again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from magi_compile.dtensor.planning.rank_plan import ContextParallelOptions
from magi_compile.dtensor.ranks.agreement import checksum_of
from magi_compile.dtensor.sequence.make_plan import HostPlan, plan
from magi_compile.integrations.packed_documents import starts_of_documents
from magi_compile.integrations.transformers import masks_of_layers
from magi_compile.masks import AttnSlices
from magi_compile.masks.block_mask import slices_from_block_mask

PLAN = "context_parallel_plan"  # the key under which a batch has its PlannedBatch
MASKS = "context_parallel_masks"  # the argument of the model that its decoder takes for `attention_mask`
LONGEST = "context_parallel_longest"  # and the one that its rotary embeddings take
COUNT = "context_parallel_count"  # and the one that the model takes for `num_items_in_batch`
IGNORED = -100
CHANGING_ROPES = frozenset({"dynamic", "longrope"})  # look at the longest position of a batch
_PADDING = {"labels": IGNORED, "shift_labels": IGNORED}
# Of the whole sequence, and said by the masks.
_REPLACED = frozenset(
    {
        "attention_mask",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "seq_idx",
        PLAN,
    }
)
_OF_IMAGES = frozenset({"token_type_ids", "mm_token_type_ids"})  # 0 for text


class LayerSlices:
    """The masks of a model's kinds of layers, as slices of a pack of documents.

    Slices come from document lengths for causal and window layers, which takes milliseconds for a million tokens; else
    from the mask functions of transformers, which take a second: for chunks, and for a model whose mask of a small pack
    differs from that by lengths.

    Args:
        config: the text config of a model with `attn_implementation="magi"`.

    Attributes:
        weights: how many layers have each mask, by the name of their kind.
        windows: the window of the masks that document lengths say.
    """

    def __init__(self, config: Any):
        self.config = config
        kinds = list(getattr(config, "layer_types", None) or [])
        sizes = [getattr(config, x, None) or 16 for x in ("sliding_window", "attention_chunk_size")]
        lengths = torch.tensor([3, 2 * max(sizes) + 5, 1, 40], device="cpu")
        found = self._by_functions(lengths)
        self.weights = {name: max(kinds.count(name), 1) for name in found}
        self.windows: dict[str | None, tuple[int | None, int]] = {}
        for name, slices in found.items():
            of_kind = self._window_of(name)
            if of_kind and _within(lengths, of_kind).content_key() == slices.content_key():
                self.windows[name] = of_kind
        if self.windows.keys() != found.keys():
            self._check_documents(lengths, found)

    def _check_documents(self, lengths: Tensor, found: dict[str | None, AttnSlices]) -> None:
        """Raises where a document in a pack has another mask than alone: rows of a batch become a pack."""
        alone = [self._by_functions(length) for length in lengths.split(1)]
        for name, slices in found.items():
            if slices.area() != sum(x[name].area() for x in alone):
                raise NotImplementedError(
                    f"layers of the kind {name!r} must see a document in a pack as they see it alone, but this version "
                    "of transformers counts over the whole pack; use transformers>=5.23"
                )

    def _window_of(self, kind: str | None) -> tuple[int | None, int] | None:
        """The window that a kind of layer has by its name; None where that says nothing (chunks)."""
        if kind is None and getattr(self.config, "attention_chunk_size", None) is not None:
            return None
        window = getattr(self.config, "sliding_window", None)
        if kind == "full_attention" or (kind is None and window is None):
            return None, 0
        return (
            (window - 1, 0)
            if kind in ("sliding_attention", None) and isinstance(window, int)
            else None
        )

    def of(self, lengths: Tensor) -> dict[str | None, AttnSlices]:
        """The slices of a pack of documents of these `lengths`, int64 on the CPU, by kind of layer; one of name None
        for a model that has one mask."""
        by_functions = (
            {} if self.windows.keys() == self.weights.keys() else self._by_functions(lengths)
        )
        return {
            name: _within(lengths, self.windows[name])
            if name in self.windows
            else by_functions[name]
            for name in self.weights
        }

    def _by_functions(self, lengths: Tensor) -> dict[str | None, AttnSlices]:
        positions = _counted(lengths)[None]
        masks = masks_of_layers(self.config, positions)
        if positions.shape[1] == 1:  # transformers takes a token for a step of generation
            return dict.fromkeys(masks, AttnSlices.causal(1))
        return {name: slices_from_block_mask(mask) for name, mask in masks.items()}


def _counted(lengths: Tensor) -> Tensor:
    """0, 1, ... within each document."""
    begins = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device="cpu") - begins.repeat_interleave(lengths, output_size=total)


def _within(lengths: Tensor, window: tuple[int | None, int]) -> AttnSlices:
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return AttnSlices.from_cu_seqlens(ends, window=window)


class Exact:
    """A tensor that FSDP2 does not find where it casts a model's arguments, as it would in a dataclass."""

    def __init__(self, value: Tensor):
        self.value = value


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """The plan of a batch for one rank. On the CPU; loaders pass it on as it is.

    Attributes:
        shape: `[B, S]` of the batch.
        kept: int64, of the B * S tokens those that are no padding; None for all.
        plans: by kind of layer, all for the tokens that are kept, one row behind the other.
        checksum: of the tokens and labels.
        key: that of the planner.
        longest: the longest position, where the model's rotary embeddings look at it.
    """

    shape: tuple[int, int]
    kept: Tensor | None
    plans: dict[str | None, HostPlan]
    checksum: int
    key: str
    longest: int | None = None

    def fits(self, batch: Mapping[str, Any]) -> bool:
        """True if `batch` has as many tokens as it had when it was planned."""
        return tuple(getattr(batch.get("input_ids"), "shape", ())) == self.shape


class BatchPlanner:
    """Plans batches for one rank of a group. Can be pickled.

    Args:
        config: the config of a model with `attn_implementation="magi"`.
        ranks: `(cp_size, rank)`.
        options: how to spread.

    Attributes:
        key: of this planner, also in workers of a loader.
    """

    def __init__(self, config: Any, ranks: tuple[int, int], options: ContextParallelOptions):
        self.layers = LayerSlices(config.get_text_config())
        self.needs_longest = bool(rope_types(config.get_text_config()) & CHANGING_ROPES)
        self.ranks, self.options, self.key = ranks, options, uuid.uuid4().hex

    def plan(self, batch: Mapping[str, Any]) -> PlannedBatch:
        """Plans a batch: `input_ids` int `[B, S]`, and perhaps `position_ids`, `attention_mask`, `labels` or
        `shift_labels` like them. Waits for the device of its tensors.

        Raises TypeError where the batch is no mapping, ValueError where there are no `input_ids` `[B, S]` or a label
        counts where there is padding, and NotImplementedError for padding between tokens and for images.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"a batch must be a dict of tensors by name, got {type(batch).__name__}"
            )
        tokens = batch.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.ndim != 2:
            got = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"`input_ids` of a batch must be a tensor [B, S], got {got}")
        _check_names(batch)
        padding, labels = _padding_of(batch), shifted_labels(batch)
        if padding is None or bool(padding.all()):
            kept = None
            begins = (
                starts_of_documents(_positions_of(batch).cpu(), padding)
                .flatten()
                .nonzero()
                .flatten()
            )
            lengths = begins.diff(append=torch.tensor([tokens.numel()], device="cpu"))
        else:
            kept = _kept_of(padding)
            lengths = padding.bool().sum(1)
            if labels is not None:
                _check_labels_of_padding(labels, padding)
        slices = self.layers.of(lengths)
        names = list(slices)
        made: Any = plan(
            masks=[slices[name] for name in names],
            weights=[self.layers.weights[name] for name in names],
            ranks=self.ranks,
            options=self.options,
        )
        checked = [tokens, *([] if labels is None else [labels])]
        shape = (tokens.shape[0], tokens.shape[1])
        plans = dict(zip(names, made, strict=True))
        longest = int(_positions_of(batch).max()) if self.needs_longest else None
        return PlannedBatch(shape, kept, plans, checksum_of(*checked), self.key, longest)


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings of a model, of all kinds of its layers."""
    of_model = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    every = [of_model, *(x for x in of_model.values() if isinstance(x, Mapping))]
    return {str(x.get("rope_type") or x.get("type") or "default") for x in every}


def _positions_of(batch: Mapping[str, Any]) -> Tensor:
    """int64 `[B, S]`: those of the batch, or what a model counts that is given none."""
    tokens, positions = batch["input_ids"], batch.get("position_ids")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if not isinstance(positions, Tensor) or positions.shape not in (
        tokens.shape,
        (1, tokens.shape[1]),
    ):
        got = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise NotImplementedError(
            f"`position_ids` of a batch must be [B, S] or [1, S], with the sizes of `input_ids`, {list(tokens.shape)}, "
            f"got {got}; those of images have more axes and are not supported"
        )
    return positions.expand(tokens.shape)


def _padding_of(batch: Mapping[str, Any]) -> Tensor | None:
    """`[B, S]` on the CPU, 0 for padding; None where the batch has no mask."""
    mask, shape = batch.get("attention_mask"), batch["input_ids"].shape
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != shape:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(
            "`attention_mask` of a batch must be one of padding, with the shape of `input_ids`, "
            f"{list(shape)}, got {got}"
        )
    return mask.cpu()


def _check_names(batch: Mapping[str, Any]) -> None:
    for name in _OF_IMAGES & batch.keys():
        if isinstance(batch[name], Tensor) and bool((batch[name] != 0).any()):
            raise NotImplementedError(
                f"`{name}` of a batch must be 0, of text, to be spread over ranks, got others; images are not supported"
            )
    check_sizes(batch)


def check_sizes(batch: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for a tensor of other sizes than `input_ids`; looks at no values."""
    shape = batch["input_ids"].shape
    for name, x in batch.items():
        if name in _REPLACED or not isinstance(x, Tensor) or x.ndim == 0:
            continue
        if x.shape[:2] != shape and name != "position_ids":
            raise NotImplementedError(
                f"`{name}` of a batch must begin with the sizes of `input_ids`, {list(shape)}, to be cut as they are, "
                f"got shape {list(x.shape)}; leave it out of the batch (images are not supported)"
            )


def _kept_of(padding: Tensor) -> Tensor:
    is_token = padding.bool()
    runs = is_token[:, :1].sum(1) + (is_token[:, 1:] & ~is_token[:, :-1]).sum(1)
    if bool((runs > 1).any()):
        raise NotImplementedError(
            "`attention_mask` of a batch must have its padding at the ends of rows to be spread over ranks, got "
            f"padding between tokens in row {int((runs > 1).nonzero()[0])}"
        )
    if not bool(is_token.any()):
        raise ValueError("`attention_mask` of a batch must have a token, got padding only")
    return is_token.flatten().nonzero().flatten()


def _check_labels_of_padding(labels: Tensor, padding: Tensor) -> None:
    """Labels where there is padding would count, and have no token that predicts them."""
    lost = (labels.cpu() != IGNORED) & ~padding.bool()
    if bool(lost.any()):
        row, place = lost.nonzero()[0].tolist()
        raise ValueError(
            f"`labels` of a batch must be {IGNORED} where padding would predict them: at padding, and at the first "
            f"token behind padding on the left; got another label behind place {place} of row {row}"
        )


def shifted_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """The labels of each token of `[B, S]`; None for a batch without labels."""
    if batch.get("shift_labels") is not None:
        return batch["shift_labels"]  # type: ignore[no-any-return]
    if batch.get("labels") is None:
        return None
    return torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


class PlanningCollator:
    """A collator that plans what another one makes. In a worker of the DataLoader, planning costs training nothing.

    Args:
        collate: makes a batch of examples.
        planner: plans it.
    """

    def __init__(self, collate: Callable[[Any], Any], planner: BatchPlanner):
        self.collate, self.planner = collate, planner

    def __call__(self, examples: Any) -> dict[str, Any]:
        batch = self.collate(examples)
        planned = self.planner.plan(batch)
        return {**batch, PLAN: planned}


class ShardedBatch:
    """This rank's tokens of a batch.

    Args:
        planned: the batch's plan.
        mesh: the ranks, of one dimension.
    """

    def __init__(self, planned: PlannedBatch, mesh: Any):
        self.planned = planned
        self.plans = {name: x.on(mesh) for name, x in planned.plans.items()}
        self.tokens = next(iter(self.plans.values()))  # all hold the same tokens

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the model in place of `batch`: `[1, tokens of this rank]` for each `[B, S]`.

        `labels` are ignored everywhere, so that a model that shifts them itself has a loss of 0; `shift_labels` count.
        """
        found = {name: x for name, x in batch.items() if name not in _REPLACED and x is not None}
        labels = shifted_labels(batch)
        if labels is not None:
            found["shift_labels"] = labels
            found.pop("labels", None)
        found["position_ids"] = _positions_of(batch)
        kept = self.planned.kept
        for name, x in found.items():
            if isinstance(x, Tensor) and x.shape[:2] == self.planned.shape:
                x = x.flatten(0, 1)
                x = x if kept is None else x[kept.to(x.device)]
                found[name] = self.tokens.shard(x[None], 1, padding=_PADDING.get(name, 0))
        if labels is not None:
            found["labels"] = torch.full_like(found["shift_labels"], IGNORED)
        if self.planned.longest is not None:
            place = found["position_ids"].device
            found[LONGEST] = torch.tensor(self.planned.longest, device=place)
        masks = {name: x.block_mask for name, x in self.plans.items()}
        found[MASKS] = masks.get(None, masks)
        found["use_cache"] = False  # a cache would keep the keys of the rank
        return found

    def unshard(self, x: Tensor, padding: float = 0) -> Tensor:
        """`[1, tokens of this rank, ...]` of every rank as `[B, S, ...]`; tokens of padding hold `padding`. All ranks
        call it together."""
        x = self.tokens.unshard(x, 1)[0]
        (batch_size, length), kept = self.planned.shape, self.planned.kept
        if kept is not None:
            whole = x.new_full((batch_size * length, *x.shape[1:]), padding)
            whole[kept.to(x.device)] = x
            x = whole
        return x.unflatten(0, (batch_size, length))
