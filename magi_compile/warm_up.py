"""Compile the Hopper kernels and the launcher into the cache before they are needed: `python -m magi_compile.warm_up`.

For images and clusters. Needs NVRTC but no GPU, and runs on all cores. By default the kernels of bfloat16 at head
dimensions 64, 128 and 256, with and without bit blocks, and those of causal and document masks; what else a call needs
is compiled at first use. Kernels that came with the package need nothing. Exits with an error if a kernel does not
compile, spills registers or serialises wgmma.

`--into FOLDER` writes the kernels as a wheel has them, and is how hatch_build.py makes these.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import HOPPER_HEAD_DIMS, forward_config
from magi_compile.kernels.mapped import KEYS_OF_TABLE
from magi_compile.kernels.plan import BlockMap
from magi_compile.kernels.sm90.backward.variants import backward_variants
from magi_compile.kernels.sm90.forward.launch import ELEMENTS, forward_variant
from magi_compile.kernels.sm90.forward.overlap import early_tiles_variant
from magi_compile.kernels.sm90.forward.split_kv import merge_variant, split_variant
from magi_compile.kernels.sm90.masks.mask_slices import lists_variant, mask_variant
from magi_compile.kernels.sm90.masks.source import mask_source
from magi_compile.kernels.sm90.planner.block_map import block_map_variants
from magi_compile.kernels.sm90.planner.tile_plan import planner_variant
from magi_compile.kernels.sm90.runtime import cubin_cache, launcher_build, shipped
from magi_compile.kernels.sm90.runtime.nvrtc import (
    CompileError,
    Variant,
    compile_anew,
    compile_variant,
    shipped_name,
)
from magi_compile.masks.program.program import MaskProgram
from magi_compile.plan.block_map import CELL

COMMON_HEAD_DIMS = (64, 128, 256)
# Of any lengths, with their conditions in any order, and documents numbered by int64.
COMMON_MASKS = (
    "q >= kv",
    "t0[q] == t0[kv]",
    "(q >= kv) & (t0[q] == t0[kv])",
    "(q >= kv) & (t0[b, q] == t0[b, kv])",
)
MORE = {
    "softcap": "scores with a soft-cap",
    "deterministic": "backwards under torch.use_deterministic_algorithms",
    "lists": "masks of block lists, of blocks of 64 and of 128 and of others",
    "ranks": "forwards that begin before the keys of other ranks are there",
}


def variants(
    head_dims: Sequence[int] = HOPPER_HEAD_DIMS,
    dtypes: Sequence[torch.dtype] = tuple(ELEMENTS),
    more: Collection[str] = tuple(MORE),
) -> Iterator[Variant]:
    """The kernels to compile; by default every variant for head dimensions that kernels are made for.

    Not among them: score programs, other mask programs than `COMMON_MASKS`, largest scores and head dimensions in
    between, which are compiled at first use.

    Args:
        head_dims: of q, k and v, some of `HOPPER_HEAD_DIMS`.
        dtypes: of these, some of `ELEMENTS`.
        more: some of `MORE`.

    Yields:
        Each kernel once.
    """
    softcaps = (0.0, 1.0) if "softcap" in more else (0.0,)
    orders = (False, True) if "deterministic" in more else (False,)
    begins = (False, True) if "ranks" in more else (False,)
    for head_dim, dtype, softcap in itertools.product(head_dims, dtypes, softcaps):
        problem = AttnProblem("cuda", (9, 0), dtype, 1, 1, head_dim, head_dim, 1.0, softcap)
        with_bits = replace(problem, has_bits=True)
        config = forward_config(problem)
        for has_stairs, is_early in itertools.product((False, True), begins):
            yield forward_variant(problem, config, has_stairs=has_stairs, is_early=is_early)
        yield forward_variant(with_bits, forward_config(with_bits))
        for some, deterministic in itertools.product((problem, with_bits), orders):
            yield backward_variants(some, deterministic)[1]
        if not softcap:  # the others do not depend on it
            preprocess, _, postprocess = backward_variants(problem)
            yield from (preprocess, postprocess, merge_variant(head_dim, dtype))
            # Alone, and beside a mask_mod of one key interval, such as a causal one.
            kinds = itertools.product((64, 128), (0, 1)) if "lists" in more else ()
            for size, intervals in kinds:
                listed = replace(problem, block_map=BlockMap(1, 1, size, size, intervals))
                yield forward_variant(listed, forward_config(listed))
                yield backward_variants(listed)[1]
            if "lists" in more:  # blocks that begin anywhere, and lists of odd ones
                table = replace(problem, block_map=BlockMap(1, 1, CELL, KEYS_OF_TABLE, has_table=1))
                yield forward_variant(table, forward_config(table))
                yield backward_variants(table)[1]
    yield planner_variant()
    yield planner_variant(has_bits=True)
    if "ranks" in more:
        yield early_tiles_variant()
    yield split_variant()
    yield lists_variant()
    yield from map(_mask_variant, COMMON_MASKS)
    if "lists" in more:
        yield from dict.fromkeys((*block_map_variants(), *block_map_variants(has_table=True)))


def _mask_variant(text: str) -> Variant:
    program = MaskProgram.parse(text)
    length = 1  # any other gives the same source
    return mask_variant(mask_source(program, program.keys(length), (torch.int64,)))


def main(argv: Sequence[str] | None = None) -> int:
    """Compile what the arguments name.

    Args:
        argv: the command line; by default that of the process.

    Returns:
        1 if a kernel did not compile, else 0.
    """
    asked = _parser().parse_args(argv)
    dtypes = [getattr(torch, name) for name in asked.dtypes]
    chosen = list(variants() if asked.all else variants(asked.head_dims, dtypes, asked.more))
    start = time.perf_counter()
    building = None if asked.into else launcher_build.begin()  # beside the kernels
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiler = compile_anew if asked.into else compile_variant
        made = dict(zip(chosen, pool.map(partial(_compile, compiler), chosen), strict=True))
    if building is not None:
        try:
            os.close(building.library())
        except (OSError, subprocess.SubprocessError) as error:  # calls go without one, slower
            launcher_build.log_absence(error)
    failures = [error for error in made.values() if isinstance(error, CompileError)]
    cubins = {x: cubin for x, cubin in made.items() if isinstance(cubin, bytes)}
    if failures:
        print("\n\n".join(dict.fromkeys(map(str, failures))), file=sys.stderr)
    elif asked.into:
        shipped.write(asked.into, {shipped_name(x): cubin for x, cubin in cubins.items()})
    with_launcher = "" if asked.into else f"{'with' if building else 'without'} the launcher, "
    print(
        f"{len(cubins)} kernels {with_launcher}"
        f"{time.perf_counter() - start:.0f} s, in {asked.into or cubin_cache.cache_dir()}"
    )
    return int(bool(failures))


def _compile(compiler: Callable[[Variant], bytes], variant: Variant) -> bytes | CompileError:
    start = time.perf_counter()
    try:
        cubin = compiler(variant)
    except CompileError as error:
        return error
    seconds = time.perf_counter() - start
    print(f"{seconds:6.2f} s  {variant.entry} {dict(variant.defines)}", flush=True)
    return cubin


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m magi_compile.warm_up", description="Compile kernels into the cache."
    )
    parser.add_argument(
        "--head-dims", nargs="+", type=int, choices=HOPPER_HEAD_DIMS, default=COMMON_HEAD_DIMS
    )
    parser.add_argument("--dtypes", nargs="+", choices=[*ELEMENTS.values()], default=["bfloat16"])
    parser.add_argument(
        "--more",
        nargs="+",
        choices=MORE,
        default=[],
        help="; ".join(f"{name}: {what}" for name, what in MORE.items()),
    )
    parser.add_argument(
        "--into",
        type=Path,
        help="an empty folder for the kernels alone, in the form that a wheel has",
    )
    parser.add_argument("--all", action="store_true", help="whatever the others say, everything")
    return parser


if __name__ == "__main__":
    sys.exit(main())
