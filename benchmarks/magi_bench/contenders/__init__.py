"""The contenders by name: ours, our peers', and those of other packages' entry points."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points

from magi_bench.contenders.base import Kernel

#: Packages add contenders with an entry point `name = "module:Class"` in this group.
ENTRY_POINTS = "magi_bench.contenders"

# Reports list them in this order.
CONTENDERS: dict[str, str] = {
    "magi-hopper": "magi:MagiHopper",
    "magi-triton": "magi:MagiTriton",
    "magi-cpu": "magi:MagiCpu",
    "magi-flex": "flex:MagiFlex",
    "fa4": "flash_attention:FlashAttention4",
    "fa3": "flash_attention:FlashAttention3",
    "cudnn-flex": "cudnn_flex:CudnnFlex",
    "cudnn": "sdpa:CudnnSdpa",
    "fa2": "flash_attention:TorchFlash",
    "flex": "flex:FlexTriton",
    "flex-flash": "flex:FlexFlash",
    "mem-efficient": "sdpa:MemoryEfficientSdpa",
    "flash-cpu": "sdpa:CpuFlashSdpa",
    "math": "sdpa:MathSdpa",
    "naive": "sdpa:Naive",
    "fa4-blocks": "flash_attention:FlashAttention4Blocks",
    "cudnn-blocks": "cudnn_blocks:CudnnBlocks",
    "vsa": "vsa:Vsa",
    "vsa-triton": "vsa:VsaTriton",
    "flashinfer": "flashinfer:FlashInfer",
    "flashinfer-cake": "flashinfer:FlashInferCake",
}


def names() -> list[str]:
    """All contenders, those of other packages last."""
    return [*CONTENDERS, *sorted(_third_party())]


@cache
def load(name: str) -> Kernel:
    """The contender called `name`, which is not asked yet whether it can run here; an entry point may be no `Kernel`,
    which is a TypeError."""
    if name in CONTENDERS:
        module, _, attribute = CONTENDERS[name].partition(":")
        made = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)()
    elif name in _third_party():
        made = _third_party()[name].load()()
    else:
        raise ValueError(f"`contender` must be one of {', '.join(names())}, got {name!r}")
    if not isinstance(made, Kernel):
        raise TypeError(f"`{name}` must be a Kernel, got {type(made).__name__}")
    return made


@cache
def _third_party() -> dict:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
