"""magi_compile: attention for training on long, irregularly masked sequences.

model = torch.compile(model, backend="magi")   # every flex_attention in it runs on our kernels
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from magi_compile._version import __version__

if TYPE_CHECKING:
    from importlib.abc import Loader

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
        select_blocks,
    )
    from magi_compile.ops.attention import (
        AttnOutput,
        flex_attention,
        flex_flash_attention,
    )
    from magi_compile.score.program import UnsupportedScoreModError

else:
    Loader = object  # importing that class costs most of the import of this package

__all__ = [
    "AttnOutput",
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
    "select_blocks",
    "synchronize_checks",
]

# Where each public name lives; resolved at first use, so that importing the package loads no kernel.
_HOMES = {
    "AttnOutput": "ops.attention",
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
    "select_blocks": "masks",
    "synchronize_checks": "_checks",
}
# Packages that are public by themselves, loaded at first use too; `ops` defines `torch.ops.magi`.
_PACKAGES = ("dtensor", "masks", "ops")


if not TYPE_CHECKING:  # type checkers know the names above, and report others

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        if name in _PACKAGES:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})


# Doors in other frameworks open where the framework is there, so that its own call by name needs no import of ours
# beyond this package. Nothing here imports a framework.


def _open_flash_attention() -> None:
    """`activate_flash_attention_impl("MAGI")`; what it activates is imported then."""

    def activate() -> Any:
        return import_module(f"{__name__}.integrations.torch_attention").activate()

    sys.modules["torch.nn.attention"].register_flash_attention_impl("MAGI", register_fn=activate)


def _open_transformers() -> None:
    """`attn_implementation="magi"`, unless it is a version that the integration is not for: importing that says so."""
    with suppress(ImportError):
        import_module(f"{__name__}.integrations.transformers")


class _Doors:
    """Opens the door in a module of another package as soon as that is imported.

    Args:
        doors: what opens them, by the name of the module.
    """

    def __init__(self, doors: dict[str, Callable[[], None]]):
        self.doors = doors
        self.found: set[str] = set()  # what is being looked for by others

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.doors or fullname in self.found:
            return None
        self.found.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self.found.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenOpen(spec.loader, self.doors[fullname])
        return spec


class _ThenOpen(Loader):
    """A loader that calls `opens` behind the module."""

    def __init__(self, loader: Loader, opens: Callable[[], None]):
        self.loader, self.opens = loader, opens

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What others ask of a module's loader, its source for example, is asked of its own.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.opens()


def _open_doors(doors: dict[str, Callable[[], None]]) -> None:
    """Now where the framework is there, else as soon as it is."""
    later = {name: opens for name, opens in doors.items() if name not in sys.modules}
    if later:
        sys.meta_path.insert(0, _Doors(later))
    for name in doors.keys() - later.keys():
        doors[name]()


_open_doors(
    {
        "torch.nn.attention": _open_flash_attention,
        "transformers.modeling_utils": _open_transformers,
    }
)
