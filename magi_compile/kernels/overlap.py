"""Optional capabilities of kernels whose keys are still under way: a pass in steps, with work of others between them.

A pass is made first, which reads no tensor and raises what can be raised, and then done step by step, on torch's
current stream of the time when it was made:

    forward     begin    local keys         backward    begin    what needs no keys
                main     remote keys                    main     what reads keys and values and writes dk and dv
                finish   out and lse                    finish   dq

Keys are local where they are there from the start, and remote where they arrive. No step waits on the host for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from magi_compile.kernels.base import AttnProblem, ForwardOutput, Grads, Kernel
from magi_compile.kernels.plan import Plan
from magi_compile.masks.slices import AttnSlices


class SavedQueries(NamedTuple):
    """`Saved` without the keys and values."""

    q: Tensor
    out: Tensor
    lse: Tensor


class KeyTensors(NamedTuple):
    """Keys and values, and where their gradients go; these are contiguous."""

    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor


class ForwardSteps(Protocol):
    """A forward pass over local and remote keys; see `EarlyKernel.early_forward`."""

    def begin(self) -> None:
        """Enqueues the work on local keys, on the stream of the call."""
        ...

    def beside(self) -> AbstractContextManager[object]:
        """Within it the current stream is the one of `main`, which may be another than that of the call."""
        ...

    def main(self) -> None:
        """Enqueues the work on remote keys, called once within `beside`, where the current stream waits for them."""
        ...

    def finish(self) -> ForwardOutput:
        """Makes the stream of the call wait for all of it; the results."""
        ...


class BackwardSteps(Protocol):
    """A backward pass; see `PhasedKernel.phased_backward`."""

    def begin(self) -> None:
        """Enqueues what needs no keys."""
        ...

    def main(self, keys: KeyTensors) -> None:
        """Enqueues what reads the keys and values of `keys`, none of them empty, and writes dk and dv there."""
        ...

    def finish(self) -> Tensor:
        """Enqueues what is left, and gives back the memory of the pass; dq."""
        ...


@runtime_checkable
class EarlyKernel(Kernel, Protocol):
    """A kernel whose forward begins with local keys before the remote ones have arrived.
    Nothing in a kernel waits for these."""

    def early_plan(self, slices: AttnSlices, problem: AttnProblem, remote_begin: int) -> Any:
        """The plan of `early_forward` for `slices`, of which the columns from `remote_begin` on are the remote keys.

        No slice has both local and remote columns, and the column in front of `remote_begin` belongs to none.
        """
        ...

    def early_forward(
        self,
        q: Tensor,
        keys: Sequence[Tensor],
        remote: Sequence[Tensor],
        plan: Any,
        problem: AttnProblem,
        *,
        free_sms: int = 0,
        max_scores: Tensor | None = None,
    ) -> ForwardSteps:
        """Attention of `q` over the local keys and values `keys` and over the `remote` ones; none of them is empty.

        `begin` leaves `free_sms` SMs to what brings remote keys, if there are more. How results are rounded may depend
        on when these arrive, except under `torch.use_deterministic_algorithms(True)`. `max_scores` as in
        `Kernel.forward`, complete when `finish` has returned.
        """
        ...


@runtime_checkable
class PhasedKernel(Kernel, Protocol):
    """A kernel whose backward has work in front of what needs keys, and behind what gives their gradients."""

    def phased_backward(
        self,
        grads: Grads,
        saved: SavedQueries,
        slices: AttnSlices | None,
        plan: Plan,
        problem: AttnProblem,
    ) -> BackwardSteps:
        """The backward pass of keys that arrive between `begin` and `main`, which is called once. dk and dv are
        complete for what is enqueued on the current stream behind it, and are not touched again."""
        ...
