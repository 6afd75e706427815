"""The command line: `magi-bench kernel | sparse | step | mods | ranks | doors | masks | report | chart | compare`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from magi_bench import arguments, contenders
from magi_bench.contenders.base import refusals
from magi_bench.doors import command as doors
from magi_bench.kernel import interleaved
from magi_bench.kernel.run import Settings, execute, order
from magi_bench.kernel.timing import Protocol
from magi_bench.mods import command as mods
from magi_bench.ranks import command as ranks
from magi_bench.results import rows
from magi_bench.results.compare import compare, to_text
from magi_bench.step import command as step
from magi_bench.trees import command as trees
from magi_bench.workloads.cells import PASSES, Cell, format_length
from magi_bench.workloads.lengths import SAMPLERS
from magi_bench.workloads.presets import PRESETS, Preset
from magi_bench.workloads.workload import MASKS, SPARSE_MASKS, build
from magi_compile.masks.library import MASKS as NAMED_MASKS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; bad arguments end in a message and exit code 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.command_line = ["magi-bench", *(sys.argv[1:] if argv is None else argv)]
    try:
        return args.command(args)
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"magi-bench: {error}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="magi-bench", description="Benchmarks of attention.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for level, summary in (
        ("kernel", "masks that all heads share, on one device"),
        ("sparse", "block-sparse masks of each head, on one device"),
    ):
        _add_run_arguments(commands.add_parser(level, help=summary), level)
    step.add_arguments(
        commands.add_parser("step", help="wall time of calls and of training steps, beside peers")
    )
    mods.add_arguments(
        commands.add_parser("mods", help="mask_mods and score_mods of users, beside FlexAttention")
    )
    ranks.add_arguments(
        commands.add_parser("ranks", help="attention and training steps across ranks, beside peers")
    )
    doors.add_arguments(
        commands.add_parser("doors", help="training steps of transformers' and torchtitan's models")
    )
    trees.add_arguments(
        commands.add_parser("trees", help="several checkouts of this package, interleaved")
    )
    masks = commands.add_parser("masks", help="list the masks, or draw one")
    masks.add_argument("--show", metavar="NAME", help="draw this mask")
    masks.add_argument("--seqlen", type=arguments.length, default=4096)
    masks.add_argument("--lengths", choices=SAMPLERS, default="seeds")
    masks.add_argument(
        "--block", type=arguments.count, default=128, help="tokens of a block of a sparse mask"
    )
    masks.add_argument("--density", type=arguments.share, default=0.2, help="of a sparse mask")
    masks.add_argument("--seed", type=int, default=42)
    masks.add_argument("--output", type=Path, help="a .png or .svg; by default text")
    masks.set_defaults(command=_masks)
    report = commands.add_parser("report", help="Markdown and one self-contained HTML page")
    report.add_argument("results", type=Path, nargs="+", help="JSONL files")
    report.add_argument("--contenders", nargs="+", metavar="NAME", help="only these")
    report.add_argument("--output", type=Path, help="without suffix; by default beside the first")
    report.add_argument("--title", default="Attention kernels")
    report.add_argument("--note", default="", help="a sentence below the title")
    report.add_argument("--readme", type=Path, help="rewrite the marked table of this file")
    report.set_defaults(command=_report)
    chart = commands.add_parser("chart", help="one picture of some contenders at one length")
    chart.add_argument("results", type=Path, nargs="+", help="JSONL files")
    chart.add_argument("--seqlen", type=arguments.length, required=True)
    chart.add_argument("--masks", nargs="+", required=True, choices=MASKS, metavar="NAME")
    chart.add_argument(
        "--contenders", nargs="+", required=True, choices=contenders.names(), metavar="NAME"
    )
    chart.add_argument("--output", type=Path, required=True, help="an .svg")
    chart.set_defaults(command=_chart)
    versus = commands.add_parser("compare", help="what is faster in B than in A, beyond noise")
    versus.add_argument("before", type=Path)
    versus.add_argument("after", type=Path)
    versus.add_argument("--threshold", type=float, default=0.03, help="changes below do not count")
    versus.add_argument("--fail-on-regression", action="store_true", help="exit code 1")
    versus.set_defaults(command=_compare)
    return parser


def _add_run_arguments(parser: argparse.ArgumentParser, level: str) -> None:
    parser.add_argument(
        "--preset", nargs="+", choices=PRESETS, default=["smoke"], help="one, or several together"
    )
    masks = SPARSE_MASKS if level == "sparse" else tuple(NAMED_MASKS)
    parser.add_argument("--masks", nargs="+", choices=masks, help="only these")
    parser.add_argument("--seqlens", nargs="+", type=arguments.length, help="only these, or others")
    parser.add_argument(
        "--heads", nargs="+", type=arguments.heads, metavar="Q:KV", help="only these, or others"
    )
    parser.add_argument(
        "--head-dim", type=arguments.head_dims, metavar="D[:DV]", help="of q and k, and of v"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--lengths", choices=SAMPLERS, help="how documents are drawn")
    if level == "sparse":
        parser.add_argument("--blocks", nargs="+", type=arguments.count, help="only these sizes")
        parser.add_argument("--densities", nargs="+", type=arguments.share, help="only these")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--contenders", nargs="+", choices=contenders.names(), metavar="NAME")
    parser.add_argument(
        "--without", nargs="+", choices=contenders.names(), metavar="NAME", default=[]
    )
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda if there is one")
    parser.add_argument("--output", type=Path, default=Path("magi-bench.jsonl"), help="JSONL file")
    parser.add_argument("--resume", action="store_true", help="go on with the output file")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and why not")
    parser.add_argument(
        "--time-limit", type=arguments.positive, default=float("inf"), metavar="SECONDS"
    )
    parser.add_argument("--cell-limit", type=arguments.positive, default=120.0, metavar="SECONDS")
    parser.add_argument(
        "--budget-ms", type=arguments.positive, help="for the repetitions of a pass"
    )
    parser.add_argument("--min-reps", type=arguments.count, default=Protocol.min_reps)
    parser.add_argument("--gate-seqlen", type=arguments.length, help="longest sequence checked")
    parser.add_argument("--cuda-graph", action="store_true", help="also time graph replays")
    parser.add_argument(
        "--interleaved",
        type=arguments.count,
        metavar="ROUNDS",
        help="time contenders round by round in one process, not one after another in their own",
    )
    parser.add_argument("--warm-l2", action="store_true", help="do not flush the L2 cache")
    parser.add_argument(
        "--jobs",
        type=arguments.count,
        help="contenders checked at a time; by default 1 on a CPU, all on a GPU",
    )
    parser.set_defaults(command=_run, level=level)


def _run(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device cuda` needs a GPU, and PyTorch sees none")
    presets = [PRESETS[name] for name in args.preset]
    cells = [c for preset in presets for c in _filtered(preset.cells(args.level, device), args)]
    if not cells:
        raise ValueError(
            f"no {args.level} cell of {', '.join(args.preset)} matches the options; `--dry-run` without them lists all"
        )
    preset = presets[0]
    names = _contenders(args, preset, device)
    if args.dry_run:
        return _dry_run(cells, names, device)
    if args.output.exists() and not args.resume:
        raise FileExistsError(f"`{args.output}` exists: add --resume, or choose another --output")
    settings = Settings(
        device=device,
        command=list(map(shlex.quote, arguments.as_typed(args.command_line, args.output))),
        passes=tuple(args.passes),
        protocol=Protocol(
            budget_ms=args.budget_ms or preset.budget_ms,
            min_reps=args.min_reps,
            flush_bytes=0 if args.warm_l2 or device == "cpu" else Protocol.flush_bytes,
            cuda_graph=args.cuda_graph,
        ),
        gate_seqlen=args.gate_seqlen or preset.gate_seqlens[args.level],
        cell_limit_s=args.cell_limit,
        time_limit_s=args.time_limit,
        jobs=args.jobs or (len(names) if device == "cuda" else 1),
    )
    if args.interleaved:
        results = interleaved.execute(
            cells, names, settings, args.output, args.interleaved, say=_say
        )
    else:
        results = execute(cells, names, settings, args.output, _say)
    failed = results.failed_rows()
    counts = (
        f"{len(results.ok_rows())} measured, {len(failed)} failed, {len(results.not_run)} not run"
    )
    _say(f"{counts}: {args.output}")
    return int(any(contenders.load(row["contender"]).is_ours for row in failed))


def _filtered(cells: list[Cell], args: argparse.Namespace) -> list[Cell]:
    """The cells that the filters leave. Lengths and heads that a preset lacks replace its own."""
    for name, wanted in (
        ("mask", args.masks),
        ("seqlen", args.seqlens),
        ("heads", args.heads),
        ("block", getattr(args, "blocks", None)),
        ("density", getattr(args, "densities", None)),
    ):
        if not wanted:
            continue
        kept = [cell for cell in cells if getattr(cell, name) in wanted]
        if not kept and name == "seqlen":
            kept = [cell.at(seqlen) for cell in cells for seqlen in wanted]
        elif not kept and name == "heads":
            pairs = [tuple(map(int, heads.split(":"))) for heads in wanted]
            kept = [replace(cell, nheads_q=q, nheads_kv=kv) for cell in cells for q, kv in pairs]
        cells = kept
    changes = {name: getattr(args, name) for name in ("dtype", "lengths", "seed")}
    changes = {name: value for name, value in changes.items() if value is not None}
    if args.head_dim:
        changes["head_dim"], changes["head_dim_v"] = args.head_dim
    return list(dict.fromkeys(replace(cell, **changes) for cell in cells))


def _contenders(args: argparse.Namespace, preset: Preset, device: str) -> list[str]:
    """Those asked for; else the preset's, or all that know the level and the device."""
    if args.contenders:
        return [name for name in args.contenders if name not in args.without]
    loaded = {
        name: contenders.load(name) for name in preset.contenders[device] or contenders.names()
    }
    return [
        name
        for name, contender in loaded.items()
        if args.level in contender.levels
        and device in contender.devices
        and name not in args.without
    ]


def _dry_run(cells: list[Cell], names: list[str], device: str) -> int:
    """Prints every cell with the contenders that would run, and the reasons of the others."""
    missing = {name: contenders.load(name).available() for name in names}
    for name, reason in missing.items():
        if reason:
            _say(f"{name} is unavailable: {reason}")
    count, described = 0, dict.fromkeys(task.cell for task in order(cells, names))
    for cell in described:
        workload = build(cell)
        runs, reasons = [], []
        for name in names:
            against = [] if missing[name] else refusals(contenders.load(name), workload, device)
            if against:
                reasons.append(f"    not {name}: {'; '.join(against)}")
            elif not missing[name]:
                runs.append(name)
        count += len(runs)
        density = workload.pairs / cell.nheads_q / cell.seqlen**2
        _say(
            f"{cell.mask_label} {format_length(cell.seqlen)} {cell.heads} d{cell.head_dims_label} "
            f"{cell.dtype}, {len(workload.documents)} documents, density {density:.1%}: "
            f"{', '.join(runs) or 'nobody'}"
        )
        for line in reasons:
            _say(line)
    _say(f"{count} measurements of {len(described)} cells on {device}")
    return 0


def _masks(args: argparse.Namespace) -> int:
    if args.show is None:
        for name in MASKS:
            documented = (NAMED_MASKS[name].__doc__ or "") if name in NAMED_MASKS else ""
            _say(f"{name:24}{documented or 'Blocks drawn for each key-value head.'}")
        return 0
    is_sparse = args.show in SPARSE_MASKS
    cell = Cell(
        "sparse" if is_sparse else "kernel",
        args.show,
        args.seqlen,
        1,
        1,
        128,
        lengths=args.lengths,
        block=args.block if is_sparse else 0,
        density=args.density if is_sparse else 1.0,
        seed=args.seed,
    )
    slices = build(cell).head_slices(0)
    if args.output is None:
        from magi_bench.draw import to_text as draw_text

        _say(draw_text(slices))
        return 0
    from matplotlib import pyplot

    from magi_compile.masks import plot

    figure = pyplot.figure(figsize=(5, 5.4), layout="constrained")
    title = f"{cell.mask_label}, {format_length(cell.seqlen)} tokens"
    plot(slices, figure.add_subplot(), title=title)
    figure.savefig(args.output, dpi=150)
    return 0


def _report(args: argparse.Namespace) -> int:
    from magi_bench.report import write_readme_table, write_report

    results = rows.load(args.results)
    if args.contenders:
        results = results.only(args.contenders)
    output = args.output or args.results[0].with_suffix("")
    for path in write_report(results, output, args.title, args.note):
        _say(str(path))
    if args.readme:
        write_readme_table(results, args.readme)
    return 0


def _chart(args: argparse.Namespace) -> int:
    from magi_bench.report.chart import to_chart

    masks = [name.replace("_", " ") for name in args.masks]
    results = rows.load(args.results)
    args.output.write_text(to_chart(results, args.seqlen, masks, args.contenders))
    _say(str(args.output))
    return 0


def _compare(args: argparse.Namespace) -> int:
    verdicts = compare(rows.load([args.before]), rows.load([args.after]), args.threshold)
    _say(to_text(verdicts))
    return int(args.fail_on_regression and any(v.verdict == "slower" for v in verdicts))


def _say(line: str) -> None:
    print(line, flush=True)
