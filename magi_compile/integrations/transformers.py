"""Hugging Face transformers 5: `attn_implementation="magi"`.

    import magi_compile.integrations.transformers  # registers "magi"

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="magi")
    model = torch.compile(model, backend="magi")  # or without: eager code runs on our kernels too

transformers asks for a mask once for each layer type and forward (`magi_mask`) and calls the attention function in each
layer (`magi_attention`). The mask is a BlockMask without block lists: the slices come from its mask function, once for
all layers that share it. Steps of generation, of a few rows behind a cache, run on `scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from magi_compile import _compat
from magi_compile._warnings import warn_once
from magi_compile.dtensor.context.positions import is_over_ranks, with_given_positions
from magi_compile.dtensor.sequence.spread_mask import SpreadMask, attend_by
from magi_compile.integrations.packed_documents import (
    MaskFunction,
    are_of_rows,
    documents_of_lists,
    documents_of_positions,
    has_documents,
    lists_given,
    may_be_packed,
    plain_block_mask,
    within_documents,
)
from magi_compile.lowering import regions
from magi_compile.masks.arguments import check_flag
from magi_compile.ops.attention import flex_attention
from magi_compile.ops.over_ranks import replacements
from magi_compile.ops.sinks import out_with_sinks

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import (
        add_offsets_to_mask_function,
        and_masks,
        create_masks_for_generate,
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
# The names in `layer_types` that are attention by a mask, and by nothing else.
KINDS_OF_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
STEP_ROWS = 16  # up to so many query rows behind a cache are a step of generation

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

    Nothing changes for models of other implementations. A model takes it at construction (`attn_implementation="magi"`)
    or later (`model.set_attn_implementation("magi")`).
    """
    AttentionInterface.register(NAME, magi_attention)
    AttentionMaskInterface.register(NAME, magi_mask)
    _compat.give_block_masks_ndim()  # GPT-2 asks its mask for them


def register_flex_attention_mask(enabled: bool = True) -> None:
    """Lets compiled models with `attn_implementation="flex_attention"` make their masks inside of the graph.

    transformers makes the BlockMask of these models with an argument that PyTorch has deprecated, and Dynamo breaks the
    graph at the warning. This replaces their mask function for the whole process, also for models that exist already.
    While Dynamo traces, the replacement leaves that argument out; in eager code it calls the original.

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
        A BlockMask without block lists; for a step of generation what `sdpa_mask` returns: bool
        `[B, 1, q_length, kv_length]`, or None if the row sees every key.
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
        mask_function = _without_padding(mask_function, attention_mask, kv_length, kv_offset)
    # A graph has to decide by the data.
    lacks_documents = torch.compiler.is_compiling() or not (
        has_padding or has_documents(mask_function)
    )
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.reshape(()) if torch.compiler.is_compiling() else int(q_offset)
        mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    elif q_offset or kv_offset:
        mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    block_mask: Any = plain_block_mask(mask_function, batch_size, q_length, kv_length, device)
    block_mask._magi_lacks_documents = lacks_documents
    block_mask._magi_padding = attention_mask if has_padding else None
    if not torch.compiler.is_compiling():
        # `generate` of transformers up to 5.23 calls mask.contiguous() with a static cache. A call of the reference is
        # the mask.
        block_mask.contiguous = ref(block_mask)
    return block_mask


def _without_padding(
    mask_function: MaskFunction, attention_mask: Any, kv_length: int, kv_offset: int
) -> MaskFunction:
    """`mask_function` without the keys that are padding in `attention_mask`."""
    padding: Any = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    without: MaskFunction = and_masks(mask_function, padding_mask_function(padding))
    return without


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
        attention_mask: what `magi_mask` returned, any other BlockMask, or a dense mask `[B, 1 or Hq, L, S]`, bool or
            added to the scores, with which attention runs on `scaled_dot_product_attention`. With the `block_mask` of a
            `SequencePlan` attention runs over all ranks of the plan, and rows are those of this rank.
        scaling: factor of the scores; None stands for `D ** -0.5`.
        dropout: must be 0.
        **rest: other arguments of the model's forward, of which these count:
            `is_causal`, what None for `attention_mask` stands for: everything (False) or, row by row, no later key
                (True). By
            default what the module says, which must be False.
            `softcap`: scores become `softcap * tanh(scores / softcap)`.
            `position_bias`: `[1 or B, Hq, L, S]`, added to the scores behind the soft-cap (T5 and its relatives).
            `s_aux`: one more score `[Hq]` in every softmax, with a value of 0 (attention sinks).
            `cu_seq_lens_q`: int `[documents + 1]`, where documents begin in the rows of all batch entries, one behind
                the other.
            Rows see keys of their own document only, whatever else the mask shows.
            `cu_seq_lens_k`: the same of keys, by default `cu_seq_lens_q`. Both start at 0, never decrease, and cut no
                batch entry's
            document. What is behind their last number is padding. Numbers on a GPU are not checked, nor those in a
            graph. `position_ids`: int `[1 or B, L]`, where documents begin in a causal mask that does not say so
            (`may_be_packed`).

    Returns:
        `(out [B, L, Hq, Dv], None)`.

    Raises:
        TypeError: `cu_seq_lens_q` or `cu_seq_lens_k` is no tensor of int32 or int64.
        ValueError: dropout; a mask of other lengths; no mask although the layer is causal; `cu_seq_lens_q` or
            `cu_seq_lens_k` do not fit the rows and keys, or each other; over ranks, `position_ids` that each rank has
            counted by itself.
        NotImplementedError: an argument that changes the scores in a way that the kernels do not have.
        RuntimeError: the model is compiled by a backend that does not lower FlexAttention.
    """
    _check_arguments(dropout, rest)
    is_causal, softcap, s_aux = (rest.get(name) for name in ("is_causal", "softcap", "s_aux"))
    (batch, nheads, rows, _), keys = query.shape, key.shape[2]
    lists = lists_given(rest.get("cu_seq_lens_q"), rest.get("cu_seq_lens_k"), (batch, rows, keys))
    bias: Tensor | None = rest.get("position_bias")
    if bias is not None:
        if replacements() is not None or is_over_ranks(attention_mask):
            raise NotImplementedError(
                "`position_bias` must be None inside context_parallel, because a model makes it of the positions that "
                "its tokens have on their rank; call flex_attention with a score_mod that looks up what it learns"
            )
        _check_bias(bias, (batch, nheads, rows, keys))
    if replacements() is None and isinstance(getattr(attention_mask, "mask_mod", None), SpreadMask):
        return _attend_over_ranks(module, query, key, value, attention_mask, scaling, rest)
    is_step = rows == 1 and lists is None
    if not isinstance(attention_mask, BlockMask) and (attention_mask is not None or is_step):
        if attention_mask is not None and lists is not None:
            raise NotImplementedError(
                "`attn_implementation='magi'` takes `cu_seq_lens_q` without a mask or with a BlockMask, "
                f"got a dense `attention_mask` of shape {list(attention_mask.shape)}"
            )
        given = {"scaling": scaling, "is_causal": is_causal, "softcap": softcap, "s_aux": s_aux}
        return _attend_dense(module, query, key, value, attention_mask, bias, given)
    if attention_mask is None and rows > 1 and _is_causal(module, is_causal):
        attention_mask = plain_block_mask(_causal, batch, rows, keys, query.device)
    positions = rest.get("position_ids")
    mask = _with_documents(module, attention_mask, lists, positions, (batch, rows, keys))
    score_mod = None if softcap is None else _softcap(softcap)
    if bias is not None:
        score_mod = _with_bias(score_mod, bias)
    aux = AuxRequest(lse=True) if s_aux is not None else None
    out = _flex(query, key, value, score_mod, mask, scaling, aux)
    if s_aux is not None:
        out, statistics = out
        out = out_with_sinks(out, statistics.lse, s_aux, heads_first=True)
    return out.transpose(1, 2).contiguous(), None


def _with_documents(
    module: torch.nn.Module,
    mask: Any,
    lists: tuple[Tensor, Tensor] | None,
    positions: Any,
    sizes: tuple[int, int, int],
) -> BlockMask | None:
    """The mask of a layer within the documents that `lists` or `positions` say."""
    is_spread = replacements() is not None and mask is not None
    # The first layer asks for all.
    if is_spread and not getattr(module, "layer_idx", 0) and are_of_rows(positions, sizes[1]):
        mask = with_given_positions(mask, positions, module.training)
    if lists is not None:
        return within_documents(mask, lists, documents_of_lists, sizes)
    if may_be_packed(module, mask, positions, sizes):
        padding = getattr(mask, "_magi_padding", None)
        pair = (positions, positions if padding is None else padding)
        return within_documents(mask, pair, documents_of_positions, sizes)
    return mask  # type: ignore[no-any-return]


def _attend_over_ranks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None,
    rest: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attention by a mask that carries its plan; no block around the model is needed, nor where layers run again."""
    for name in ("position_bias", "cu_seq_lens_q", "cu_seq_lens_k"):
        if rest.get(name) is not None:
            raise NotImplementedError(
                f"`{name}` must be None with the mask of a SequencePlan, which stands for the whole sequence; plan a "
                "mask that has the documents"
            )
    positions: Any = rest.get("position_ids")
    if not getattr(module, "layer_idx", 0) and are_of_rows(positions, query.shape[2]):
        mask = with_given_positions(mask, positions, module.training)
    softcap, s_aux = rest.get("softcap") or 0.0, rest.get("s_aux")
    out, lse, _ = attend_by(mask.mask_mod, None, query, key, value, scaling, softcap)
    if s_aux is not None:
        out = out_with_sinks(out, lse, s_aux, heads_first=True)
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
            f"`position_bias` must have the shape of the scores, {list(scores)}, or 1 batch entry, got "
            f"{list(bias.shape)}"
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
    """A dense mask that is added to scores of `dtype`, with `bias`,
    and with `hidden` where a bool mask shows nothing."""
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


def _attend_dense(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    given: dict[str, Any],
) -> tuple[Tensor, None]:
    """A step of generation, and attention with a dense mask of the user's.
    A row that a bool mask shows nothing gives 0."""
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
            "`attn_implementation='magi'` runs steps with soft-cap or sinks on the "
            "`eager_attention_forward` of the model's "
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


def masks_of_layers(config: Any, positions: Tensor) -> dict[str | None, BlockMask]:
    """The masks that transformers makes for a model, by kind of layer in alphabetical order, as `generate` asks for
    them; one of name None for a model that takes one.

    `config` is the text config of a model with `attn_implementation="magi"`. `positions`, int `[1, tokens]` on the
    CPU, begin a document where they do not go up by 1. Raises NotImplementedError where layers are no attention, or
    one that this package does not have.
    """
    shape = 1, positions.shape[1], 1  # all that is asked for
    tokens = torch.empty(shape, dtype=torch.float32, device=positions.device)
    found = create_masks_for_generate(config, tokens, None, None, position_ids=positions)
    masks = dict(sorted(found.items())) if isinstance(found, dict) else {None: found}
    if others := [name for name in masks if name is not None and name not in KINDS_OF_LAYERS]:
        raise NotImplementedError(
            f"layers of the kinds {others} do not run over ranks, only {sorted(KINDS_OF_LAYERS)}: linear attention and "
            "convolutions keep a state along the sequence"
        )
    return masks


def _traceable_flex_attention_mask(**given: Any) -> BlockMask:
    """`flex_attention_mask` of transformers, by the same keywords; in a graph without the argument that breaks it."""
    mask_function: MaskFunction | None = given.get("mask_function")
    if mask_function is None or not torch.compiler.is_compiling():
        # Its own default stands for None.
        return flex_attention_mask(**{k: v for k, v in given.items() if k != "mask_function" or v})
    batch_size, q_length, kv_length = (given[x] for x in ("batch_size", "q_length", "kv_length"))
    q_offset, kv_offset = (given.get(x, 0) for x in ("q_offset", "kv_offset"))
    if given.get("attention_mask") is not None:
        mask_function = _without_padding(
            mask_function, given["attention_mask"], kv_length, kv_offset
        )
    mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    device = given.get("device", "cpu")
    return create_block_mask(mask_function, batch_size, None, q_length, kv_length, device)


register()
