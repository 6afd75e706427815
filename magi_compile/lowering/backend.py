"""The two front doors of the lowering: the Dynamo backend "magi", and stock Inductor with a pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from magi_compile import _compat
from magi_compile._version import __version__
from magi_compile.lowering import regions
from magi_compile.lowering.flex import lower_flex_attention
from magi_compile.lowering.options import DEFAULTS, LoweringOptions, options_of, split_options
from magi_compile.lowering.prologue import split_off
from magi_compile.ops.validation import check_mapping

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from magi_compile.lowering.options import OptionsByName

regions.watch()


def make_backend(
    inner: str | Callable[..., Any] = "inductor", options: LoweringOptions = DEFAULTS
) -> Callable[..., Any]:
    """A Dynamo backend that lowers FlexAttention and hands the graph to `inner`.

    Args:
        inner: another backend, by name or as a callable; "inductor" takes torch.compile's `mode` and `options`.
        options: the defaults, which torch.compile's `options={"magi.*": ...}` override.

    Returns:
        A function for `torch.compile(model, backend=...)`.

    Raises:
        TypeError: `options` is not a `LoweringOptions`.
        ValueError: `inner` is not a backend.
    """

    if not isinstance(options, LoweringOptions):
        raise TypeError(f"`options` must be a LoweringOptions, got {options!r}")
    is_known = callable(inner) or inner == "inductor"  # others are looked up among packages
    if not is_known and inner not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueError(
            f"`inner` must be a function or the name of a backend, one of "
            f"{', '.join(torch.compiler.list_backends())}, got {inner!r}"
        )

    def backend(
        gm: GraphModule,
        example_inputs: list[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable[..., Any]:
        ours, rest = chosen(options)
        if inner != "inductor" and (mode or rest):
            raise ValueError(
                f"`mode` and `options` need the inner backend 'inductor', got {inner!r}"
            )
        lower_flex_attention(gm, ours)
        split = split_off(gm, example_inputs)
        gm, example_inputs = split.graph, split.example_inputs
        if inner == "inductor":
            settings = {**(torch._inductor.list_mode_options(mode) if mode else {}), **rest}
            with _compat.inductor_cache_key(_version_of_sources()):
                compiled = torch._inductor.compile(gm, example_inputs, options=settings)
        else:
            compiler = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
            compiled = compiler(gm, example_inputs)
        return split.wrap(compiled)

    def chosen(given: dict[str, Any] | None) -> tuple[LoweringOptions, dict[str, Any]]:
        try:
            check_mapping("options", given)
            return split_options({**defaults, **(given or {})})
        except (TypeError, ValueError) as error:  # torch.compile asks first when it compiles
            raise _compat.as_user_error(error) from None

    defaults = {f"magi.{name}": value for name, value in asdict(options).items()}
    backend.lowering_options = lambda given: chosen(given)[0]  # type: ignore[attr-defined]
    return backend


magi = make_backend()


@contextmanager
def enabled(**options: Unpack[OptionsByName]) -> Iterator[None]:
    """Enables the lowering for the length of a `with` block, and restores what was there before.

    Args:
        **options: as in `enable`.

    Yields:
        Nothing.
    """
    previous = _compat.installed_pre_grad_pass()
    _enable(options_of("enabled", dict(options)))
    try:
        yield
    finally:
        _compat.install_pre_grad_pass(previous)


def enable(**options: Unpack[OptionsByName]) -> None:
    """Lowers FlexAttention in everything that stock Inductor compiles from now on (`torch.compile(model)`).

    Use it where other code calls torch.compile. Graphs that are already compiled do not change. It holds for all
    threads, except that a thread which has compiled something keeps the setting of that moment.

    Args:
        **options: `strict`, `kernel`, `slice_capacity`, `bits` and `verify`: what each does is said at
            `LoweringOptions`.

    Raises:
        RuntimeError: another pass is installed as Inductor's `pre_grad_custom_pass`.
        TypeError: an option does not exist, or its value is of the wrong type.
    """
    _enable(options_of("enable", dict(options)))


def _enable(chosen: LoweringOptions) -> None:
    previous = _compat.installed_pre_grad_pass()
    if previous is not None and not _compat.is_pre_grad_pass_of_ours(previous):
        raise RuntimeError(
            f"Inductor's `pre_grad_custom_pass` must be None for `enable`, got {previous!r}; use "
            "backend='magi', or remove that pass"
        )
    # Inductor's caches key on this: it changes with everything that changes what the pass does.
    identity = f"{_version_of_sources()} {chosen}"
    _compat.install_pre_grad_pass(
        _compat.pre_grad_pass(lambda gm: lower_flex_attention(gm, chosen), identity, chosen)
    )


@cache
def _version_of_sources() -> str:
    """The version and a digest of all that a compiled graph of ours is made by, which Inductor's caches on disk must
    not take from other sources: code that was compiled for an op with other arguments or strides fails."""
    package = Path(__file__).parents[1]
    folders = ("masks", "score", "plan", "kernels", "ops", "lowering", "dtensor")
    files = sorted(path for folder in folders for path in (package / folder).rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return f"magi_compile {__version__} {digest.hexdigest()[:16]}"


def disable() -> None:
    """Undoes `enable()`."""
    if _compat.is_pre_grad_pass_of_ours(_compat.installed_pre_grad_pass()):
        _compat.install_pre_grad_pass(None)
