"""magi_compile: attention for training on long, irregularly masked sequences.

model = torch.compile(model, backend="magi")   # every flex_attention in it runs on our kernels
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from magi_compile._version import __version__

if TYPE_CHECKING:
    from magi_compile import dtensor, masks, ops
    from magi_compile._checks import MaskDataError, synchronize_checks
    from magi_compile.lowering.backend import disable, enable, enabled, make_backend
    from magi_compile.lowering.explain import Explanation, explain
    from magi_compile.lowering.options import LoweringOptions
    from magi_compile.lowering.report import LoweringRefusedError, LoweringReport, lowering_report
    from magi_compile.masks import (
        AttnSlice,
        AttnSlices,
        MaskType,
        UnsupportedMaskError,
        create_block_mask,
    )
    from magi_compile.ops.attention import (
        AttnOutput,
        AttnOutputWithMaxScores,
        flex_attention,
        flex_flash_attention,
    )
    from magi_compile.score.program import UnsupportedScoreModError

__all__ = [
    "AttnOutput",
    "AttnOutputWithMaxScores",
    "AttnSlice",
    "AttnSlices",
    "Explanation",
    "LoweringOptions",
    "LoweringRefusedError",
    "LoweringReport",
    "MaskDataError",
    "MaskType",
    "UnsupportedMaskError",
    "UnsupportedScoreModError",
    "__version__",
    "create_block_mask",
    "disable",
    "dtensor",
    "enable",
    "enabled",
    "explain",
    "flex_attention",
    "flex_flash_attention",
    "lowering_report",
    "make_backend",
    "masks",
    "ops",
    "synchronize_checks",
]

# Where each public name lives; resolved at first use, so that importing the package loads no kernel.
_HOMES = {
    "AttnOutput": "ops.attention",
    "AttnOutputWithMaxScores": "ops.attention",
    "AttnSlice": "masks",
    "AttnSlices": "masks",
    "Explanation": "lowering.explain",
    "LoweringOptions": "lowering.options",
    "LoweringRefusedError": "lowering.report",
    "LoweringReport": "lowering.report",
    "MaskDataError": "_checks",
    "MaskType": "masks",
    "UnsupportedMaskError": "masks",
    "UnsupportedScoreModError": "score.program",
    "create_block_mask": "masks",
    "disable": "lowering.backend",
    "enable": "lowering.backend",
    "enabled": "lowering.backend",
    "explain": "lowering.explain",
    "flex_attention": "ops.attention",
    "flex_flash_attention": "ops.attention",
    "lowering_report": "lowering.report",
    "make_backend": "lowering.backend",
    "synchronize_checks": "_checks",
}
# Packages that are public by themselves, loaded at first use too; `ops` defines `torch.ops.magi`.
_PACKAGES = ("dtensor", "masks", "ops")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
