"""Scales of zero and below: no kernel sees one, because its sign goes into q."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scaled(NamedTuple):
    """`factor * q`, and a positive scale under which the scores are those of q:
    the gradient of q is `factor` times that of this one."""

    q: Tensor
    softmax_scale: float
    factor: float

    @staticmethod
    def of(q: Tensor, softmax_scale: float, score: str) -> Scaled:
        """Costs nothing where the scale is positive already. A `score` program tells the sign of a score: any scale
        stays with it."""
        if softmax_scale > 0 or score:
            return Scaled(q, softmax_scale, 1.0)
        if softmax_scale == 0:
            return Scaled(q * 0.0, 1.0, 0.0)
        return Scaled(-q, -softmax_scale, -1.0)

    def gradient(self, dq: Tensor) -> Tensor:
        """The gradient of q, in the memory of that of `self.q`."""
        return dq if self.factor == 1.0 else dq.mul_(self.factor)


def scale_of_kernel(softmax_scale: float, score: str) -> float:
    """The scale that `Scaled.of` makes of it."""
    return softmax_scale if score else abs(softmax_scale) or 1.0
