"""Hugging Face transformers 5: `attn_implementation="magi"`.

    import magi_compile.integrations.transformers  # registers "magi"

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="magi")
    model = torch.compile(model, backend="magi")  # or without: eager code runs on our kernels too

transformers asks for a mask once for each layer type and forward (`magi_mask`) and calls the attention function in each
layer (`magi_attention`). The mask is a BlockMask without block lists: the slices come from its mask function, once for all
layers that share it. Steps of generation, of a few rows behind a cache, run on `scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from magi_compile._compat import outside_of_modes, traces_inner_graph, version_of
from magi_compile._warnings import warn_once
from magi_compile.dtensor.context.positions import with_given_positions
from magi_compile.lowering import regions
from magi_compile.masks.arguments import check_flag, read_cu_seqlens
from magi_compile.masks.block_mask import one_block_mask
from magi_compile.ops.attention import flex_attention
from magi_compile.ops.over_ranks import replacements
from magi_compile.ops.sinks import out_with_sinks

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        add_offsets_to_mask_function,
        and_masks,
        flex_attention_mask,
        padding_mask_function,
        prepare_padding_mask,
        sdpa_mask,
    )
except ImportError as error:
    raise ImportError(
        "magi_compile.integrations.transformers needs transformers 5: "
        'pip install ".[transformers]" in a clone of magi_compile'
    ) from error

NAME = "magi"
STEP_ROWS = 16  # up to so many query rows behind a cache are a step of generation

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_COUNTED = frozenset(
    {"is_causal", "softcap", "s_aux", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k"}
)
# What models pass that says nothing about scores which the mask does not say.
_WITHOUT_EFFECT = frozenset(
    {
        "cache",
        "cache_position",
        "deterministic",
        "is_cross_attention",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "sliding_window",
        "token_type_ids",
        "use_cache",
    }
)
# What changes the scores or asks for them, and what a user can do.
_REFUSED = {
    "output_attentions": "attention weights; use attn_implementation='eager'",
    "head_mask": "a factor for each head; use attn_implementation='eager'",
    "layer_head_mask": "a factor for each head; use attn_implementation='eager'",
    "indices": "sparse attention by indices; use the model's default",
    "block_indices": "sparse attention by indices; use the model's default",
    "sinks": "attention sinks under another name than `s_aux`; use attn_implementation='eager'",
}


def register() -> None:
    """Registers "magi" as an attention implementation of transformers. Importing this module has done it already.

    Nothing changes for models of other implementations. A model takes it at construction (`attn_implementation="magi"`) or
    later (`model.set_attn_implementation("magi")`).
    """
    AttentionInterface.register(NAME, magi_attention)
    AttentionMaskInterface.register(NAME, magi_mask)


def register_flex_attention_mask(enabled: bool = True) -> None:
    """Lets compiled models with `attn_implementation="flex_attention"` make their masks inside of the graph.

    transformers makes the BlockMask of these models with an argument that PyTorch has deprecated, and Dynamo breaks the graph
    at the warning. This replaces their mask function for the whole process, also for models that exist already. While
    Dynamo traces, the replacement leaves that argument out; in eager code it calls the original.

    Args:
        enabled: False restores the function of transformers.

    Raises:
        TypeError: `enabled` is not a bool.
    """
    check_flag("enabled", enabled)
    function = _traceable_flex_attention_mask if enabled else flex_attention_mask
    AttentionMaskInterface.register("flex_attention", function)


def magi_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> BlockMask | Tensor | None:
    """The mask of a layer type; transformers calls it with keywords.

    Args:
        batch_size: number of batch entries, B.
        q_length: rows of a batch entry.
        kv_length: keys of a batch entry, those of a cache included.
        q_offset: position of the first row, an int or an integer tensor of one element (static caches).
        kv_offset: position of the first key.
        mask_function: what may attend to what, `(b, h, q, kv) -> bool`, in positions.
        attention_mask: bool `[B, number of positions]`, False for padding; None without padding.
        device: where the mask will be used.
        **rest: what `transformers.masking_utils.sdpa_mask` takes beyond that.

    Returns:
        A BlockMask without block lists; for a step of generation what `sdpa_mask` returns: bool `[B, 1, q_length, kv_length]`,
        or None if the row sees every key.
    """
    if mask_function is None:
        raise TypeError("`mask_function` must be a function of b, h, q and kv, got None")
    if q_length == 1 or (q_length < kv_length and q_length <= STEP_ROWS):
        if q_length > 1:
            rest["allow_is_causal_skip"] = False
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **rest,
        )
    has_padding = attention_mask is not None and (
        torch.compiler.is_compiling() or not bool(attention_mask.all())
    )
    if has_padding:
        padding: Any = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    # A graph has to decide by the data.
    lacks_documents = torch.compiler.is_compiling() or not (
        has_padding or _has_documents(mask_function)
    )
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.reshape(()) if torch.compiler.is_compiling() else int(q_offset)
        mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    elif q_offset or kv_offset:
        mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    block_mask: Any = _block_mask(mask_function, batch_size, q_length, kv_length, device)
    block_mask._magi_lacks_documents = lacks_documents
    block_mask._magi_padding = attention_mask if has_padding else None
    if not torch.compiler.is_compiling():
        # `generate` of transformers up to 5.23 calls mask.contiguous() with a static cache. A call of the reference is the mask.
        block_mask.contiguous = ref(block_mask)
    return block_mask


def magi_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer; transformers calls it with keywords behind `attention_mask`.

    Args:
        module: the layer's attention module.
        query: `[B, Hq, L, D]`, fp32, bf16 or fp16.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        attention_mask: what `magi_mask` returned, any other BlockMask, or a dense mask `[B, 1 or Hq, L, S]`, bool or added to
            the scores, with which attention runs on `scaled_dot_product_attention`.
        scaling: factor of the scores; None stands for `D ** -0.5`.
        dropout: must be 0.
        **rest: other arguments of the model's forward, of which these count:
            `is_causal`, what None for `attention_mask` stands for: everything (False) or, row by row, no later key (True). By
            default what the module says, which must be False.
            `softcap`: scores become `softcap * tanh(scores / softcap)`.
            `position_bias`: `[1 or B, Hq, L, S]`, added to the scores behind the soft-cap (T5 and its relatives).
            `s_aux`: one more score `[Hq]` in every softmax, with a value of 0 (attention sinks).
            `cu_seq_lens_q`: int `[documents + 1]`, where documents begin in the rows of all batch entries, one behind the other.
            Rows see keys of their own document only, whatever else the mask shows.
            `cu_seq_lens_k`: the same of keys, by default `cu_seq_lens_q`. Both start at 0, never decrease, and cut no batch entry's
            document. What is behind their last number is padding. Numbers on a GPU are not checked, nor those in a graph.
            `position_ids`: int `[1 or B, L]`, where documents begin in a causal mask that does not say so (`_may_be_packed`).

    Returns:
        `(out [B, L, Hq, Dv], None)`.

    Raises:
        TypeError: `cu_seq_lens_q` or `cu_seq_lens_k` is no tensor of int32 or int64.
        ValueError: dropout; a mask of other lengths; no mask although the layer is causal; `cu_seq_lens_q` or `cu_seq_lens_k` do not
            fit the rows and keys, or each other.
        NotImplementedError: an argument that changes the scores in a way that the kernels do not have.
        RuntimeError: the model is compiled by a backend that does not lower FlexAttention.
    """
    _check_arguments(dropout, rest)
    is_causal, softcap, s_aux = (rest.get(name) for name in ("is_causal", "softcap", "s_aux"))
    bias: Tensor | None = rest.get("position_bias")
    cu_seq_lens_q, cu_seq_lens_k = rest.get("cu_seq_lens_q"), rest.get("cu_seq_lens_k")
    rows = query.shape[2]
    sizes = (query.shape[0], rows, key.shape[2])
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        _check_lists(cu_seq_lens_q, cu_seq_lens_k, sizes)
    is_step = rows == 1 and cu_seq_lens_q is None
    if not isinstance(attention_mask, BlockMask) and (attention_mask is not None or is_step):
        if attention_mask is not None and cu_seq_lens_q is not None:
            raise NotImplementedError(
                "`attn_implementation='magi'` takes `cu_seq_lens_q` without a mask or with a BlockMask, "
                f"got a dense `attention_mask` of shape {list(attention_mask.shape)}"
            )
        given = {"scaling": scaling, "is_causal": is_causal, "softcap": softcap, "s_aux": s_aux}
        if bias is not None:
            _check_bias(bias, (query.shape[0], query.shape[1], rows, key.shape[2]))
        return _attend_dense(module, query, key, value, attention_mask, bias, given)
    if attention_mask is None and rows > 1 and _is_causal(module, is_causal):
        attention_mask = _block_mask(_causal, *sizes, query.device)
    positions: Any = rest.get("position_ids")
    is_over_ranks = replacements() is not None and attention_mask is not None
    # The first layer asks for all.
    if is_over_ranks and not getattr(module, "layer_idx", 0) and _are_of_rows(positions, rows):
        attention_mask = with_given_positions(attention_mask, positions, module.training)
    if cu_seq_lens_q is not None:
        lists = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
        attention_mask = _within_documents(attention_mask, lists, _documents_of_lists, sizes)
    elif _may_be_packed(module, attention_mask, positions, sizes):
        padding = getattr(attention_mask, "_magi_padding", None)
        pair = (positions, positions if padding is None else padding)
        attention_mask = _within_documents(attention_mask, pair, _documents_of_positions, sizes)
    aux = AuxRequest(lse=True) if s_aux is not None else None
    score_mod = None if softcap is None else _softcap(softcap)
    if bias is not None:
        _check_bias(bias, (query.shape[0], query.shape[1], rows, key.shape[2]))
        score_mod = _with_bias(score_mod, bias)
    out = _flex(query, key, value, score_mod, attention_mask, scaling, aux)
    if s_aux is not None:
        out, statistics = out
        out = out_with_sinks(out, statistics.lse, s_aux, heads_first=True)
    return out.transpose(1, 2).contiguous(), None


def _check_arguments(dropout: float, rest: dict[str, Any]) -> None:
    """Refuses what changes the scores; what no setting mends comes first."""
    for name, given in rest.items():
        if name in _COUNTED or name in _WITHOUT_EFFECT or given is None or given is False:
            continue
        if name in _REFUSED:
            raise NotImplementedError(
                f"`attn_implementation='magi'` has no `{name}`, which is {_REFUSED[name]}"
            )
        _warn_once(
            f"`attn_implementation='magi'` does not know the argument `{name}` and ignores it"
        )
    if dropout:
        raise ValueError(
            f"`attn_implementation='magi'` has no dropout, got {dropout}: set the dropout of attention in the model's "
            "config to 0 (`attention_dropout`, or `attention_probs_dropout_prob` in older models)"
        )


def _check_lists(of_rows: Any, of_keys: Any, sizes: tuple[int, int, int]) -> None:
    """Raises for `cu_seq_lens_q` and `cu_seq_lens_k` whose kinds do not fit; `_check_documents` reads their numbers."""
    if of_rows is None:
        raise ValueError("`cu_seq_lens_q` must be given where `cu_seq_lens_k` is, got None")
    if of_keys is None and sizes[1] != sizes[2]:
        raise ValueError(
            f"`cu_seq_lens_k` must be given with `cu_seq_lens_q` where rows and keys differ, {sizes[1]} and {sizes[2]}, got None"
        )
    for name, given in (("cu_seq_lens_q", of_rows), ("cu_seq_lens_k", of_keys)):
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {given!r}")
        if given.ndim != 1 or not given.shape[0]:
            raise ValueError(f"`{name}` must have shape [documents + 1], got {list(given.shape)}")
        if given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`{name}` must hold int32 or int64 values, got {given.dtype}")
    if of_keys is not None and of_keys.shape != of_rows.shape:
        raise ValueError(
            f"`cu_seq_lens_k` must have the length of `cu_seq_lens_q`, {of_rows.shape[0]}, got {of_keys.shape[0]}"
        )


def _check_documents(lists: tuple[Tensor, Tensor], sizes: tuple[int, int, int]) -> None:
    """Raises for numbers in `cu_seq_lens_q` and `cu_seq_lens_k` that are no documents of the batch entries."""
    batch, *lengths = sizes
    entries, has_tokens = [], []
    for name, given, length in zip(("cu_seq_lens_q", "cu_seq_lens_k"), lists, lengths, strict=True):
        borders = read_cu_seqlens(name, given)
        end = int(borders[-1])
        if end > batch * length:
            raise ValueError(
                f"`{name}` must end within the {batch * length} tokens of all batch entries, got {end}"
            )
        if missing := sorted({*range(0, end, max(length, 1))} - {*borders.tolist()}):
            raise ValueError(
                f"`{name}` must hold the ends of batch entries, multiples of {length}, got {borders.tolist()} without {missing[0]}"
            )
        entries.append(borders[:-1] // max(length, 1))
        has_tokens.append(borders.diff() > 0)
    of_others = (entries[0] != entries[1]) & has_tokens[0] & has_tokens[1]
    if of_others.any():
        number = int(of_others.nonzero()[0])
        raise ValueError(
            f"`cu_seq_lens_k` must have each document in the batch entry where `cu_seq_lens_q` has it, got document {number} in "
            f"entries {int(entries[1][number])} and {int(entries[0][number])}"
        )


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Returns whether a call without a mask is causal.

    Raises:
        ValueError: the call leaves it open. `eager` takes it as everything, `sdpa` as causal.
    """
    if is_causal is None and getattr(module, "is_causal", True):
        raise ValueError(
            f"`attention_mask` must be a mask in the causal {type(module).__name__}, got None: make it with "
            "transformers.masking_utils.create_causal_mask, or say `is_causal=True` or `is_causal=False`"
        )
    return bool(is_causal)


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _softcap(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _check_bias(bias: Tensor, scores: tuple[int, int, int, int]) -> None:
    """Raises where `bias` is not of the shape of the scores `[B, Hq, L, S]`, or `[1, Hq, L, S]`."""
    if bias.dim() != 4 or bias.shape[0] not in (1, scores[0]) or bias.shape[1:] != scores[1:]:
        raise ValueError(
            f"`position_bias` must have the shape of the scores, {list(scores)}, or 1 batch entry, got {list(bias.shape)}"
        )


def _with_bias(score_mod: Callable[..., Tensor] | None, bias: Tensor) -> Callable[..., Tensor]:
    """A score_mod that adds `bias [1 or B, Hq, L, S]` to what another one gives."""
    is_shared = bias.shape[0] == 1
    table = bias[0] if is_shared else bias

    def with_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        before = score if score_mod is None else score_mod(score, b, h, q, kv)
        return before + (table[h, q, kv] if is_shared else table[b, h, q, kv])

    return with_bias


def _added_to_mask(
    mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype, hidden: float
) -> Tensor | None:
    """A dense mask that is added to scores of `dtype`, with `bias`, and with `hidden` where a bool mask shows nothing."""
    if bias is not None:
        bias = bias.to(dtype)
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        shown = mask.new_zeros((), dtype=dtype) if bias is None else bias
        return torch.where(mask, shown, hidden)
    if bias is None:
        return mask
    # The least number of a wider dtype stays a number.
    least = torch.finfo(dtype).min
    return torch.where(mask.isneginf(), mask, mask.clamp(min=least)).to(dtype) + bias


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: BlockMask | None,
    scale: float | None,
    aux: AuxRequest | None,
) -> Any:
    """FlexAttention on our kernels; in a graph PyTorch's, which the lowering will find there."""
    attend: Any = flex_attention
    if torch.compiler.is_compiling():
        _check_compiler()
        attend = flex.flex_attention
    return attend(query, key, value, score_mod, block_mask, scale, enable_gqa=True, return_aux=aux)


@torch.compiler.assume_constant_result
def _check_compiler() -> None:
    """Raises what Dynamo passes on, instead of breaking the graph."""
    if not regions.lowers_what_is_traced():
        raise RuntimeError(
            "`attn_implementation='magi'` needs a compiler that knows it: torch.compile(model, backend='magi'), or "
            "magi_compile.enable() before torch.compile with another backend"
        )


def _block_mask(
    mask_function: MaskFunction,
    batch: int,
    q_length: int,
    kv_length: int,
    device: torch.device | str,
) -> BlockMask:
    """A BlockMask whose mask function says everything."""
    if torch.compiler.is_compiling():
        # The lowering removes it, block lists and all.
        return create_block_mask(mask_function, batch, None, q_length, kv_length, device)
    return one_block_mask(mask_function, batch, q_length, kv_length, device)


def _has_documents(mask_function: Any) -> bool:
    """True if transformers has put documents into a mask function, as far as its parts tell. Where they do not,
    documents are added once more, which changes nothing."""
    parts, seen = [mask_function], set()
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if "packed_sequence_mask_function" in getattr(part, "__qualname__", ""):
            return True
        for cell in getattr(part, "__closure__", None) or ():
            try:
                held = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            held = held if isinstance(held, (tuple, list)) else (held,)
            parts += [inner for inner in held if callable(inner)]
    return False


def _may_be_packed(
    module: torch.nn.Module, mask: BlockMask | None, positions: Any, sizes: tuple[int, int, int]
) -> bool:
    """True if documents have to be read from `positions`, which this attention got, but its mask perhaps did not.

    transformers leaves documents out of a mask where the model does not hand the positions on (gpt-oss), where there is a
    cache (the default of `use_cache`), and where there is an `attention_mask`. Its flash attention reads the positions in
    each layer, unless the `attention_mask` has padding, and so do we. A BlockMask of the user's says everything itself.
    """
    _, rows, keys = sizes
    is_open = getattr(mask, "_magi_lacks_documents", False)
    if not is_open or not getattr(module, "is_causal", False) or rows != keys:
        return False
    return _are_of_rows(positions, rows)


def _are_of_rows(positions: Any, rows: int) -> bool:
    """True if `positions` are `[1 or B, rows]`, one for each row. Those of images and videos have more dimensions."""
    return isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == rows


class _WithinDocuments(NamedTuple):
    """A mask within documents (None where there is one document), and the tensors that these were read from."""

    block_mask: BlockMask | None
    tensors: tuple[Tensor, Tensor]
    versions: tuple[int, ...]

    def is_of(self, tensors: tuple[Tensor, Tensor], versions: tuple[int, ...]) -> bool:
        is_same = self.tensors[0] is tensors[0] and self.tensors[1] is tensors[1]
        return is_same and self.versions == versions


Documents = (
    tuple[Tensor, Tensor] | None
)  # the document of each row and of each key, `[B, L]` and `[B, S]`


def _within_documents(
    block_mask: Any,
    tensors: tuple[Tensor, Tensor],
    read: Callable[[tuple[Tensor, Tensor], tuple[int, int, int]], Documents],
    sizes: tuple[int, int, int],
) -> BlockMask | None:
    """`block_mask` where query and key are of the same document; made once for all layers that share it.

    Args:
        block_mask: None for everything.
        tensors: what says where documents of rows and of keys begin.
        read: makes documents of `tensors`, or None if there is only one.
        sizes: batch entries, rows and keys of each.
    """
    is_traced = torch.compiler.is_compiling()
    versions = () if is_traced else tuple(map(version_of, tensors))
    known: _WithinDocuments | None = getattr(block_mask, "_magi_within_documents", None)
    if known is not None and known.is_of(tensors, versions):
        return block_mask if known.block_mask is None else known.block_mask
    made = None
    # A mask of the user's is there for evaluation and for training.
    with nullcontext() if is_traced else outside_of_modes():
        documents = read(tensors, sizes)
        if documents is not None:
            of_row, of_key = documents

            def mask_function(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
                is_within = of_row[b, q] == of_key[b, kv]
                if block_mask is None:
                    return is_within
                return block_mask.mask_mod(b, h, q, kv) & is_within

            made = _block_mask(mask_function, *sizes, of_row.device)
    if block_mask is not None and not (is_traced and _is_in_inner_graph()):
        block_mask._magi_within_documents = _WithinDocuments(made, tensors, versions)
    return block_mask if made is None else made


@torch.compiler.assume_constant_result
def _is_in_inner_graph() -> bool:
    """True inside a traced checkpoint, which must not change objects from outside and shares no masks."""
    return traces_inner_graph()


def _documents_of_positions(
    tensors: tuple[Tensor, Tensor], sizes: tuple[int, int, int]
) -> Documents:
    """A document begins where positions go back to 0. A gap, a step, a repeat or a jump back to another position is no border.

    0 behind 0 is a document of one token if all positions are 0 or go up by 1, as in a pack; else it is a repeat.

    Args:
        tensors: the positions, `[1 or B, L]`, and the padding mask, with whose padding there are no documents; the positions again
            if there is none.
        sizes: batch entries, rows and keys of each.
    """
    positions, padding = tensors
    place = positions.expand(sizes[0], -1)
    before, here = place[:, :-1], place[:, 1:]
    is_start = here == 0
    is_counted = (is_start | (here == before + 1)).all(-1, keepdim=True)
    begins = is_start & ((before > 0) | is_counted)
    if padding is not positions:
        begins = begins & padding.all()
    if not torch.compiler.is_compiling() and not bool(begins.any()):
        return None
    of_row = torch.nn.functional.pad(begins.long().cumsum(-1), (1, 0))
    return of_row, of_row


def _documents_of_lists(tensors: tuple[Tensor, Tensor], sizes: tuple[int, int, int]) -> Documents:
    """A document begins at each number of `cu_seq_lens`, counted over all batch entries."""
    batch, *lengths = sizes
    if not torch.compiler.is_compiling() and all(x.device.type == "cpu" for x in tensors):
        _check_documents(tensors, sizes)
    of_row, of_key = (
        torch.searchsorted(
            starts,
            torch.arange(batch * length, device=starts.device, dtype=starts.dtype),
            right=True,
        ).view(batch, length)
        for starts, length in zip(tensors, lengths, strict=True)
    )
    return of_row, of_key


def _attend_dense(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    given: dict[str, Any],
) -> tuple[Tensor, None]:
    """A step of generation, and attention with a dense mask of the user's. A row that a bool mask shows nothing gives 0."""
    if mask is not None and query.shape[2] > STEP_ROWS:
        _warn_once(
            "`attn_implementation='magi'` got a dense `attention_mask`, whose attention runs on "
            "scaled_dot_product_attention: give a BlockMask, or position_ids and no mask"
        )
    if given["softcap"] is None and given["s_aux"] is None:
        scaling, is_causal = given["scaling"], given["is_causal"]
        if bias is not None:
            mask = _added_to_mask(mask, bias, query.dtype, -math.inf)
        return sdpa_attention_forward(
            module, query, key, value, mask, scaling=scaling, is_causal=is_causal
        )
    # What sdpa has not, the eager attention in the file of every model that needs it has.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise NotImplementedError(
            f"`attn_implementation='magi'` runs steps with soft-cap or sinks on the `eager_attention_forward` of the model's "
            f"file, and {type(module).__module__} has none; use attn_implementation='eager'"
        )
    # Its softmax has no rule for a row of -inf.
    added = _added_to_mask(mask, bias, query.dtype, torch.finfo(query.dtype).min)
    out = eager(module, query, key, value, added, **given)[0]
    if mask is not None and mask.dtype == torch.bool:
        out = out.masked_fill(~mask.any(-1).transpose(1, 2)[..., None], 0)
    return out, None


# Dynamo calls it while it traces.
_warn_once = torch.compiler.assume_constant_result(warn_once)


def _traceable_flex_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> BlockMask:
    """`flex_attention_mask` of transformers; in a graph without the argument that breaks it."""
    if mask_function is None or not torch.compiler.is_compiling():
        return flex_attention_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            **({} if mask_function is None else {"mask_function": mask_function}),
            attention_mask=attention_mask,
            device=device,
            **rest,
        )
    if attention_mask is not None:
        padding: Any = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    return create_block_mask(mask_function, batch_size, None, q_length, kv_length, device)


register()
