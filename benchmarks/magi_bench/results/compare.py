"""Two result files side by side: what is faster and what is slower, beyond the noise of both."""

from __future__ import annotations

import math
from typing import NamedTuple

from magi_bench.results.rows import Results


class Verdict(NamedTuple):
    """One pass of one row of both files.

    `speedup` is the old median over the new one. "faster" or "slower" need that to be beyond the threshold and the
    ranges from the 20th to the 80th percentile of the two not to touch; else the verdict is "same".
    """

    key: str
    which: str
    before_ms: float
    after_ms: float
    verdict: str

    @property
    def speedup(self) -> float:
        return self.before_ms / self.after_ms


def compare(before: Results, after: Results, threshold: float = 0.03) -> list[Verdict]:
    """Compares all passes measured in both, where medians must differ by the share `threshold`. A pass that is ok in
    `before` alone is "lost". A ValueError: a negative threshold, or nothing in common."""
    if threshold < 0:
        raise ValueError(f"`threshold` must not be negative, got {threshold}")
    verdicts = []
    for old in before.ok_rows():
        new = after.rows.get(old["key"])
        if new is None:
            continue
        for which, old_times in old["passes"].items():
            new_times = new["passes"].get(which) if new["status"] == "ok" else None
            if new_times is None:
                verdicts.append(Verdict(old["key"], which, old_times["ms"], math.inf, "lost"))
                continue
            verdict = _judge(old_times, new_times, threshold)
            verdicts.append(Verdict(old["key"], which, old_times["ms"], new_times["ms"], verdict))
    if not verdicts:
        raise ValueError(
            "the two files have no measured row in common; compare runs of the same cases and contenders"
        )
    return verdicts


def _judge(old: dict, new: dict, threshold: float) -> str:
    if new["ms"] < old["ms"] / (1 + threshold) and new["p80_ms"] < old["p20_ms"]:
        return "faster"
    if new["ms"] > old["ms"] * (1 + threshold) and new["p20_ms"] > old["p80_ms"]:
        return "slower"
    return "same"


def to_text(verdicts: list[Verdict]) -> str:
    """Losses and regressions first, then improvements, then a count of everything."""
    lines = []
    for wanted in ("lost", "slower", "faster"):
        chosen = [v for v in verdicts if v.verdict == wanted]
        for v in sorted(chosen, key=lambda v: v.speedup):
            change = "" if wanted == "lost" else f"  {v.speedup:.2f}x  -> {v.after_ms:.4g} ms"
            lines.append(f"{wanted:7} {v.key} {v.which}  {v.before_ms:.4g} ms{change}")
    changed = [v.speedup for v in verdicts if v.verdict != "lost"]
    mean = math.exp(sum(map(math.log, changed)) / len(changed)) if changed else float("nan")
    counts = {
        name: sum(v.verdict == name for v in verdicts)
        for name in ("faster", "slower", "same", "lost")
    }
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    return "\n".join([*lines, f"{summary}; geometric mean of the speedups {mean:.3f}"])
