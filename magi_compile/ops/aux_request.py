"""Results beside the output: `return_lse` and `return_aux`, as FlexAttention has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from magi_compile.masks.arguments import check_flag

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest


def asks_for_max_scores(return_lse: Any, return_aux: Any) -> bool:
    """Checks both arguments; whether the largest scores are asked for."""
    from torch.nn.attention import flex_attention as flex

    check_flag("return_lse", return_lse)
    if not isinstance(return_aux, (flex.AuxRequest, type(None))):
        raise TypeError(f"`return_aux` must be an AuxRequest or None, got {return_aux!r}")
    if return_aux is not None and return_lse:
        raise ValueError("one of `return_lse` and `return_aux` must be left out, got both")
    return return_aux is not None and return_aux.max_scores


def returned(
    out: Tensor,
    lse: Tensor,
    max_scores: Tensor | None = None,
    *,
    return_lse: bool,
    return_aux: AuxRequest | None,
) -> Any:
    """`out` alone, or with what was asked for."""
    from torch.nn.attention import flex_attention as flex

    if return_aux is not None:
        return out, flex.AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores)
    return (out, lse) if return_lse else out
