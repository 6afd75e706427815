"""The arguments of `magi-bench kernel` and `sparse`, and what they do with them."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from magi_bench import arguments, contenders
from magi_bench.arguments import count, length, positive, say
from magi_bench.cases import PASSES, Case, format_length
from magi_bench.contenders.base import refusals
from magi_bench.kernel.run import execute, order
from magi_bench.settings import Settings
from magi_bench.timing import Protocol
from magi_bench.workloads.lengths import SAMPLERS
from magi_bench.workloads.presets import PRESETS, Preset
from magi_bench.workloads.workload import SPARSE_MASKS, build
from magi_compile.masks.library import MASKS as NAMED_MASKS


def add_arguments(parser: argparse.ArgumentParser, level: str) -> None:
    """Every option of a command, "kernel" or "sparse"."""
    option = parser.add_argument
    several: dict[str, Any] = {"nargs": "+"}
    names: dict[str, Any] = {"choices": contenders.names(), "metavar": "NAME", **several}
    seconds: dict[str, Any] = {"type": positive, "metavar": "SECONDS"}
    masks = SPARSE_MASKS if level == "sparse" else tuple(NAMED_MASKS)
    option("--preset", choices=PRESETS, default=["smoke"], help="one, or several", **several)
    option("--masks", choices=masks, help="only these", **several)
    option("--seqlens", type=length, help="only these, or others", **several)
    option("--heads", type=arguments.heads, metavar="Q:KV", help="only these, or others", **several)
    option("--head-dim", type=arguments.head_dims, metavar="D[:DV]", help="of q and k, and of v")
    option("--lengths", choices=SAMPLERS, help="how documents are drawn")
    if level == "sparse":
        option("--blocks", type=count, help="only these sizes", **several)
        option("--densities", type=arguments.share, help="only these", **several)
    option("--contenders", **names)
    option("--without", default=[], **names)
    option("--passes", choices=PASSES, default=PASSES, **several)
    arguments.add(parser, ("dtype", "device", "seed"), seed=None)
    option("--output", type=Path, default=Path("magi-bench.jsonl"), help="JSONL file")
    option("--resume", action="store_true", help="go on with the output file")
    option("--dry-run", action="store_true", help="say what would run, and why not")
    option("--time-limit", default=float("inf"), **seconds)
    option("--cell-limit", default=120.0, **seconds)
    option("--budget-ms", type=positive, help="for the repetitions of a pass")
    option("--min-reps", type=count, default=Protocol.min_reps)
    option("--gate-seqlen", type=length, help="longest sequence checked")
    words = "time contenders round by round in one process, not one after another in their own"
    option("--interleaved", type=count, metavar="ROUNDS", default=1, help=words)
    words = "contenders checked at a time; by default 1 on a CPU, all on a GPU"
    option("--jobs", type=count, help=words)
    parser.set_defaults(command=run, level=level)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed."""
    device = arguments.device_of(args.device)
    presets = [PRESETS[name] for name in args.preset]
    cases = [c for preset in presets for c in _filtered(preset.cases(args.level, device), args)]
    if not cases:
        raise ValueError(
            f"no {args.level} case of {', '.join(args.preset)} matches the options; `--dry-run` without them lists all"
        )
    preset = presets[0]
    names = _contenders(args, preset, device)
    if args.dry_run:
        return _dry_run(cases, names, device)
    if args.output.exists() and not args.resume:
        raise FileExistsError(f"`{args.output}` exists: add --resume, or choose another --output")
    settings = Settings(
        device=device,
        passes=tuple(args.passes),
        protocol=Protocol(
            budget_ms=args.budget_ms or preset.budget_ms,
            min_reps=args.min_reps,
            flush_bytes=0 if device == "cpu" else Protocol.flush_bytes,
            rounds=args.interleaved,
        ),
        gate_tokens=args.gate_seqlen or preset.gate_seqlens[args.level],
        cell_limit=args.cell_limit,
        seconds=args.time_limit,
        jobs=args.jobs or (len(names) if device == "cuda" else 1),
    )
    command = list(map(shlex.quote, arguments.as_typed(args.command_line, args.output)))
    results = execute(cases, names, settings, command, args.output, say)
    ok, failed, left = results.ok_rows(), results.failed_rows(), results.not_run
    say(f"{len(ok)} measured, {len(failed)} failed, {len(left)} not run: {args.output}")
    return int(any(row["is_ours"] for row in failed))


def _filtered(cases: list[Case], args: argparse.Namespace) -> list[Case]:
    """The cases that the filters leave. Lengths and heads that a preset lacks replace its own."""
    for name, wanted in (
        ("mask", args.masks),
        ("seqlen", args.seqlens),
        ("heads", args.heads),
        ("block", getattr(args, "blocks", None)),
        ("density", getattr(args, "densities", None)),
    ):
        if not wanted:
            continue
        kept = [case for case in cases if getattr(case, name) in wanted]
        if not kept and name == "seqlen":
            kept = [case.at(seqlen) for case in cases for seqlen in wanted]
        elif not kept and name == "heads":
            pairs = [tuple(map(int, heads.split(":"))) for heads in wanted]
            kept = [replace(case, nheads_q=q, nheads_kv=kv) for case in cases for q, kv in pairs]
        cases = kept
    changes = {name: getattr(args, name) for name in ("dtype", "lengths", "seed")}
    changes = {name: value for name, value in changes.items() if value is not None}
    if args.head_dim:
        changes["head_dim"], changes["head_dim_v"] = args.head_dim
    return list(dict.fromkeys(replace(case, **changes) for case in cases))


def _contenders(args: argparse.Namespace, preset: Preset, device: str) -> list[str]:
    """Those asked for; else the preset's, or all that know the level and the device."""
    if args.contenders:
        return [name for name in args.contenders if name not in args.without]
    asked = preset.contenders_on_cpu if device == "cpu" else None
    made = map(contenders.load, asked or contenders.names())
    able = (x.name for x in made if args.level in x.levels and device in x.devices)
    return [name for name in able if name not in args.without]


def _dry_run(cases: list[Case], names: list[str], device: str) -> int:
    """Prints every case with the contenders that would run, and the reasons of the others."""
    missing = {name: contenders.load(name).available() for name in names}
    for name, reason in missing.items():
        if reason:
            say(f"{name} is unavailable: {reason}")
    counted, described = 0, dict.fromkeys(task.case for task in order(cases, names))
    for case in described:
        workload = build(case)
        runs, reasons = [], []
        for name in names:
            against = [] if missing[name] else refusals(contenders.load(name), workload, device)
            if against:
                reasons.append(f"    not {name}: {'; '.join(against)}")
            elif not missing[name]:
                runs.append(name)
        counted += len(runs)
        density = workload.pairs / case.nheads_q / case.seqlen**2
        say(
            f"{case.mask_label} {format_length(case.seqlen)} {case.heads} d{case.head_dims_label} "
            f"{case.dtype}, {len(workload.documents)} documents, density {density:.1%}: "
            f"{', '.join(runs) or 'nobody'}"
        )
        for line in reasons:
            say(line)
    say(f"{counted} measurements of {len(described)} cases on {device}")
    return 0
