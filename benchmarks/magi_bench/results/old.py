"""Rows of `step`, `mods`, `ranks`, `doors` and `trees` as they were written until 2026-11:
a JSON file with a context and flat rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from magi_bench.cases import Case

# Of a pass; what else a row has is of the contender.
MEASURED = {
    *(
        "ms",
        "rounds",
        "calls",
        "recompiles",
        "ratio",
        "tflops",
        "tokens_per_s",
        "mfu",
        "peak_bytes",
    ),
    *("kernels", "launches", "kernel_ms"),
}
PLACE = {
    *("row", "mod", "framework", "attention", "mask", "tokens", "layers", "pass", "mode", "ranks"),
    *("nheads_q", "nheads_kv", "head_dim", "dtype", "min_ms", "max_ms"),
}
TITLES = {
    "step": "Wall time of attention and of training steps",
    "mods": "mask_mods and score_mods beside FlexAttention",
    "ranks": "Attention across ranks",
    "doors": "Training steps of other frameworks' models",
    "trees": "Trees of this package",
}


def records_of(run: str, file: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines that would be written today.

    Args:
        run: a name for the run.
        file: the file's content.

    Yields:
        The record of the run and those of its rows.

    Raises:
        ValueError: it is no file of these commands.
    """
    rows, context = file.get("rows"), file.get("context", {})
    words = str(context.get("command", "")).split()
    level = words[1] if words[:1] == ["magi-bench"] else ""
    if not isinstance(rows, list) or level not in TITLES:
        raise ValueError(f"`{run}` is not a result of magi-bench")
    settings = context.get("settings", {})
    made = [row for flat in rows for row in _rows(level, flat, settings, context.get("ranks", 1))]
    if level == "mods":  # their ratios were those of FlexAttention to each of ours
        from magi_bench.runner import compare

        for key in dict.fromkeys(str(row["case"]) for row in made):
            compare([row for row in made if str(row["case"]) == key])
    records = [{"kind": "row", "run": run, **row} for row in made]
    planned = [record["key"] for record in records]
    run_record: dict[str, Any] = {"kind": "run", **context, "run": run, "planned": planned}
    run_record["title"] = f"{TITLES[level]}, {context['device']}"
    if settings:
        run_record["protocol"] = {"rounds": settings["rounds"]["count"], "in_turns": True}
    yield run_record
    yield from records


def _rows(
    level: str, flat: dict[str, Any], settings: dict[str, Any], ranks: int
) -> Iterator[dict[str, Any]]:
    name = next(flat[x] for x in ("row", "mod", "framework", "mask") if x in flat)
    sizes = ("nheads_q", "nheads_kv", "head_dim", "dtype")
    which = flat.get("pass", "fwdbwd")
    place: dict[str, Any] = {x: flat.get(x, settings.get(x)) for x in sizes}
    more = {"mode": flat.get("mode", ""), "layers": flat.get("layers", 1), "which": which}
    case = Case(level, name, flat["tokens"], **place, **more, ranks=flat.get("ranks", ranks))
    rest = {k: x for k, x in flat.items() if k not in MEASURED | PLACE}
    if level == "mods":
        rest |= {"of": rest.pop("kind"), "about": rest.pop("what"), "what": name}
    kept = MEASURED & set(flat) - ({"ratio"} if level == "mods" else set())
    times, contender = flat.get("ms"), flat.get("contender", flat.get("attention", "-"))
    by_name = times if isinstance(times, dict) else {contender: times}
    first = next(iter(by_name))
    for contender, ms in by_name.items():
        who = {"contender": contender, "label": contender, "is_ours": contender == first}
        row = {"key": f"{case.key}/{contender}", **who, "case": case.to_json(), **rest}
        row["status"] = rest.get("status", "ok" if ms else "error")
        if ms is not None:
            spread = {"p20_ms": flat.get("min_ms", ms), "p80_ms": flat.get("max_ms", ms)}
            ratio = {"ratio": ms / by_name[first]} if isinstance(times, dict) else {}
            row["passes"] = {which: {**{k: flat[k] for k in kept}, **spread, **ratio, "ms": ms}}
        yield row
