"""Steps of the Llama on packed documents, on one rank or over several: what is called, and what it is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from magi_bench.clock import ALONE, Ahead, Alone, Ready
from magi_bench.gate import Check, truth_of_step
from magi_bench.settings import Settings
from magi_bench.workloads.llama import Llama, Pack, Shape


def build(
    settings: Settings, layers: int, device: torch.device | str, kernel_options: Any = None
) -> Llama:
    """The model, the same from every call and on every rank."""
    dim = settings.dim
    sizes = (layers, dim, settings.ffn_dim or 2 * dim, settings.nheads_q, settings.nheads_kv)
    torch.manual_seed(settings.seed)
    with torch.device(device):
        model = Llama(Shape(*sizes, settings.vocab), kernel_options)
    return model.to(getattr(torch, settings.dtype))


def checked_parameters(model: Llama) -> list[Tensor]:
    """Whose gradients are compared: attention's own, where a wrong mask shows most."""
    return [model.get_parameter(f"blocks.{at}.qkv.weight") for at in (0, len(model.blocks) - 1)]


def steps(
    model: Llama,
    loss_of: Callable[..., Tensor],
    ahead: Ahead,
    which: str,
    around: Callable[[Any], AbstractContextManager[Sequence[Any]]] = nullcontext,
    world: Alone = ALONE,
) -> Ready:
    """The loss without gradients, or steps, for "fwdbwd", which also return the gradients that are checked. `ahead`
    has a pack for each call, and `around` is a context around forward and backward that gives the arguments of
    `loss_of`."""

    def forward() -> Sequence[Tensor]:
        with around(ahead.next()) as arguments, torch.no_grad():
            return [world.total(loss_of(model, *arguments))]

    def step() -> Sequence[Tensor]:
        one = ahead.next()
        model.zero_grad()
        with around(one) as arguments:
            loss = loss_of(model, *arguments)
            loss.backward()
        for weight in model.parameters() if world.size > 1 else ():
            assert weight.grad is not None
            world.total(weight.grad)
        gradients = [x.grad for x in checked_parameters(model) if x.grad is not None]
        return [world.total(loss.detach()), *gradients]

    ahead.renew(1)
    return Ready(forward if which == "fwd" else step, ahead.renew)


def check_steps(model: Llama, pack: Pack, results: Sequence[Tensor]) -> Check:
    """Holds the results of a step to those of `model` on one rank, without FlexAttention and torch.compile. Layers run
    again in its backward, since one rank has the tokens of all here."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]

    def run() -> list[Tensor]:
        loss = model(pack.tokens, pack.targets, pack.document, pack.lengths)
        return [loss.detach(), *torch.autograd.grad(loss, checked_parameters(model))]

    return truth_of_step(model, run).check(results, len(pack.document))
