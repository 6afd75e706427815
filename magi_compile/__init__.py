"""magi_compile: attention for training on long, irregularly masked sequences.

model = torch.compile(model, backend="magi")   # every flex_attention in it runs on our kernels
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Resolved at first use: importing the package loads neither the compiler nor a kernel.
_PUBLIC = {
    "AttnSlice": "masks",
    "AttnSlices": "masks",
    "MaskType": "masks",
    "AttnOutput": "ops.attention",
    "flex_attention": "ops.attention",
    "flex_flash_attention": "ops.attention",
    "MaskDataError": "ops.checks",
    "synchronize_checks": "ops.checks",
    "LoweringOptions": "lowering.options",
    "LoweringRefusedError": "lowering.report",
    "disable": "lowering.backend",
    "enable": "lowering.backend",
    "enabled": "lowering.backend",
    "explain": "lowering.explain",
    "lowering_report": "lowering.report",
    "make_backend": "lowering.backend",
}

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from magi_compile.lowering.backend import disable, enable, enabled, make_backend
    from magi_compile.lowering.explain import explain
    from magi_compile.lowering.options import LoweringOptions
    from magi_compile.lowering.report import LoweringRefusedError, lowering_report
    from magi_compile.masks import AttnSlice, AttnSlices, MaskType
    from magi_compile.ops.attention import AttnOutput, flex_attention, flex_flash_attention
    from magi_compile.ops.checks import MaskDataError, synchronize_checks


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
