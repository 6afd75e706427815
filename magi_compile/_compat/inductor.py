"""Inductor: the pass over Dynamo's graphs, and the keys of its caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def pre_grad_pass(
    rewrite: Callable[[torch.fx.GraphModule], object], identity: str, options: Any = None
) -> Any:
    """A pass over Dynamo's graphs for `install_pre_grad_pass`; Inductor's caches key on `identity`.
    It keeps `options`."""
    return _pre_grad_pass_class()(rewrite, identity, options)


def installed_pre_grad_pass() -> Any:
    """Inductor's `pre_grad_custom_pass`, or None."""
    import torch._inductor.config as config

    return config.pre_grad_custom_pass


def install_pre_grad_pass(graph_pass: Any) -> None:
    """Makes `graph_pass` (or None) Inductor's `pre_grad_custom_pass`, in this thread and all that have not read it yet.

    What is set in Inductor's config may hold for the thread that sets it alone (torch 2.13); others read the default.
    """
    import torch._inductor.config as config

    config.pre_grad_custom_pass = graph_pass
    config._config["pre_grad_custom_pass"].default = graph_pass  # type: ignore[attr-defined]


def is_inductor_option(name: str) -> bool:
    """True if Inductor takes an option of this name."""
    import torch._inductor.config as config

    return hasattr(config, name)


def inductor_options() -> list[str]:
    """The names of Inductor's options."""
    import torch._inductor.config as config

    return list(config._config)  # type: ignore[attr-defined]


def is_pre_grad_pass_of_ours(graph_pass: Any) -> bool:
    """True if `graph_pass` was made by `pre_grad_pass`."""
    return isinstance(graph_pass, _pre_grad_pass_class())


def __getattr__(name: str) -> Any:
    if name == "PreGradPass":  # made at first use: its base class brings Inductor with it
        return _pre_grad_pass_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _pre_grad_pass_class() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class PreGradPass(CustomGraphPass):
        """Pickled as its identity, which is all that Inductor's caches have to know of it."""

        __qualname__ = "PreGradPass"

        def __init__(
            self,
            rewrite: Callable[[torch.fx.GraphModule], object] | None,
            identity: str,
            options: Any = None,
        ):
            self.rewrite, self.identity, self.options = rewrite, identity, options

        def __call__(self, graph: torch.fx.Graph) -> None:
            assert graph.owning_module is not None and self.rewrite is not None
            self.rewrite(graph.owning_module)

        def uuid(self) -> str:
            return self.identity

        def __deepcopy__(self, _: Any) -> Any:
            return self

        def __reduce__(self) -> Any:
            return (type(self), (None, self.identity))

    return PreGradPass


def inductor_cache_key(tag: str) -> Any:
    """A context in which the keys of Inductor's caches on disk hold `tag` too."""
    config: Any = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag} {tag}".strip())
