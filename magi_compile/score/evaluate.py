"""Running a score program on a grid of heads, queries and keys, in PyTorch.

Values are tensors of three dimensions, `[heads, queries, keys]`, of size 1 along those that they do not depend on.
Functions are called under torch.vmap for each pair, so that dtypes are those of numbers, as in FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from magi_compile import _compat
from magi_compile.functions.text import parameters
from magi_compile.score.program import Look, ScoreProgram

DIMS = 3


def on_grid(function: Callable[..., Any], values: Mapping[str, Any]) -> Tensor:
    """The result of a function of a program, as a tensor of three dimensions."""
    arguments = [values[name] for name in parameters(function)]
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    varies = [any(x.dim() and x.shape[dim] > 1 for x in tensors) for dim in range(DIMS)]
    mapped = function
    for dim in reversed(range(DIMS)):
        if varies[dim]:
            axes = tuple(
                0 if isinstance(x, Tensor) and x.dim() and x.shape[dim] > 1 else None
                for x in arguments
            )
            mapped = torch.vmap(mapped, in_dims=axes)
    result = mapped(*map(_without_ones, arguments))
    if not isinstance(result, Tensor):  # in fp32 like scores, whatever the default dtype
        dtype = torch.float32 if isinstance(result, float) else None
        result = torch.tensor(result, dtype=dtype, device="cpu")
    for dim in range(DIMS):
        if not varies[dim]:
            result = result.unsqueeze(dim)
    return result


def _without_ones(x: Any) -> Any:
    return x.squeeze() if isinstance(x, Tensor) else x


class Tile:
    """One program on one grid.

    `values` are those of `score`, `b`, `h`, `q`, `kv` and the captured ints; `visible` is bool and fits the grid, None
    where all is visible.
    """

    def __init__(
        self,
        program: ScoreProgram,
        tables: list[Tensor],
        values: dict[str, Any],
        visible: Tensor | None,
    ):
        self.program, self.tables, self.visible = program, tables, visible
        self.values = dict(values)
        self.places: dict[str, tuple[Tensor, ...]] = {}
        with torch.no_grad(), _compat.vmap_in_ops():
            for look in program.looks:
                self._look_up(look)

    def run(self, name: str, **more: Tensor) -> Tensor | None:
        """The values of the function `name`; None where there is none, which stands for zero."""
        function = self.program.functions.get(name)
        if function is None:
            return None
        with torch.no_grad(), _compat.vmap_in_ops():
            return on_grid(function, {**self.values, **more})

    def add_gradient(self, look: Look, gradient: Tensor, total: Tensor) -> None:
        """Adds the gradient of a look-up to that of its tensor."""
        place = self.places[look.name]
        shape = torch.broadcast_shapes(*(index.shape for index in place)) if place else (1, 1, 1)
        sums = gradient.to(total.dtype).sum_to_size(shape)
        if place:
            total.index_put_(place, sums, accumulate=True)
        else:
            total += sums[0, 0, 0]

    def _look_up(self, look: Look) -> None:
        table = self.tables[look.table]
        place = tuple(
            self._index(look, dim, on_grid(self.program.functions[name], self.values))
            for dim, name in enumerate(look.indices)
        )
        self.places[look.name] = place
        self.values[look.name] = table[place] if place else table

    def _index(self, look: Look, dim: int, index: Tensor) -> Tensor:
        """`index` itself where it is one of the tensor's; what is out of bounds at hidden pairs counts for nothing."""
        size = self.tables[look.table].shape[dim]
        index = index.long()
        is_out = (index < -size) | (index >= size)
        if not bool(is_out.any()):
            return index
        is_wrong = is_out if self.visible is None else is_out & self.visible
        if bool(is_wrong.any()):
            found = int(index.expand(is_wrong.shape)[is_wrong][0])
            raise IndexError(
                f"the score_mod `{self.program}` must look up what is there, but index {found} is out "
                f"of bounds for dimension {dim} of t{look.table} with size {size}"
            )
        return torch.where(is_out, 0, index)
