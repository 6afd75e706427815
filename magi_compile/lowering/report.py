"""The lowering report: one record per attention call of a graph, with the decision and its reasons."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger("magi_compile")


class LoweringRefusedError(NotImplementedError):
    """An attention cannot be lowered, and `strict` is set or nothing else can run it."""


@dataclass(frozen=True)
class Decision:
    """One FlexAttention call of one graph.

    Attributes:
        location: where the model calls it, as `file:line in function`, or "" where the graph does not say.
        q_shape: `[B, Hq, Sq, D]`; a size that is dynamic in the graph by its symbol.
        k_shape: `[B, Hk, Sk, D]`.
        mask: the mask as an expression, or "" where it could not be read.
        kernel: the kernel that runs it, or None where it stays on FlexAttention.
        reasons: every reason for staying; empty where it was lowered.
        passed_over: the kernels of higher preference and why they refused.
        notes: what the kernel leaves to another one or runs as something else, and how the mask is evaluated.
        score: the score_mod as an expression, where it is more than a scale and a soft-cap and could be read; else "".
    """

    location: str
    q_shape: tuple[int | str, ...]
    k_shape: tuple[int | str, ...]
    mask: str
    kernel: str | None
    reasons: tuple[str, ...] = ()
    passed_over: tuple[tuple[str, tuple[str, ...]], ...] = ()
    notes: tuple[str, ...] = ()
    score: str = ""

    @property
    def shape(self) -> str:
        q, k = (", ".join(map(str, sizes)) for sizes in (self.q_shape, self.k_shape))
        return f"q [{q}], k [{k}]"

    def __str__(self) -> str:
        where = f" at {self.location}" if self.location else ""
        if self.kernel:
            score = f", score {self.score}" if self.score else ""
            return f"lowered to {self.kernel}{where}: {self.shape}, mask {self.mask}{score}"
        reasons = "".join(f"\n  - {reason}" for reason in self.reasons)
        return f"kept on FlexAttention{where}: {self.shape}{reasons}"


@dataclass
class LoweringReport:
    """Every attention lowered or refused since the start of the process, or since `clear()`.

    Under `enable()`, a graph that Inductor takes from its cache is not lowered again and so not listed.
    """

    decisions: list[Decision] = field(default_factory=list)
    num_graphs: int = 0  # graphs with attention that were compiled, recompilations included
    _warned: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)

    @property
    def lowered(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.kernel]

    @property
    def refused(self) -> list[Decision]:
        return [decision for decision in self.decisions if not decision.kernel]

    def add(self, decision: Decision) -> None:
        """Keeps `decision` and logs it: a refusal as a warning, once for each place and reason."""
        self.decisions.append(decision)
        if decision.kernel:
            logger.info("%s", decision)
            return
        self._warn_once((decision.location, decision.reasons), str(decision))

    def warn_once(self, location: str, message: str) -> None:
        """Logs what no graph has: a warning, once for each place."""
        self._warn_once((location, ()), message)

    def _warn_once(self, key: tuple[str, tuple[str, ...]], message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s", message)

    def clear(self) -> None:
        self.decisions.clear()
        self._warned.clear()
        self.num_graphs = 0

    def __str__(self) -> str:
        if not self.decisions:
            return "no FlexAttention call was compiled"
        kernels = sorted({decision.kernel for decision in self.lowered if decision.kernel})
        to = f" to {', '.join(kernels)}" if kernels else ""
        graphs = f"{self.num_graphs} graph{'' if self.num_graphs == 1 else 's'}"
        return f"{len(self.lowered)} of {len(self.decisions)} FlexAttention calls lowered{to}, {graphs} compiled"


REPORT = LoweringReport()


def lowering_report() -> LoweringReport:
    """The `LoweringReport` of this process: print it, or read `lowered` and `refused`."""
    return REPORT
