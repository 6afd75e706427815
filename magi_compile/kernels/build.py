"""Compile the Hopper kernels and the launcher into the cache: `python -m magi_compile.kernels.build`.

Needs NVRTC but no GPU. Exits with an error if a variant does not compile, spills registers or serialises wgmma.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import (
    HOPPER_HEAD_DIMS,
    forward_config,
)
from magi_compile.kernels.sm90.backward.variants import backward_variants
from magi_compile.kernels.sm90.forward.launch import ELEMENTS, forward_variant
from magi_compile.kernels.sm90.forward.split_kv import merge_variant, split_variant
from magi_compile.kernels.sm90.masks.mask_slices import lists_variant
from magi_compile.kernels.sm90.planner.tile_plan import planner_variant
from magi_compile.kernels.sm90.runtime import launcher_build
from magi_compile.kernels.sm90.runtime.nvrtc import CompileError, Variant, compile_variant


def variants() -> Iterator[Variant]:
    """Every variant for head dimensions that kernels are made for, without score programs and largest scores: the
    others are compiled at first use."""
    for head_dim, dtype, softcap in itertools.product(HOPPER_HEAD_DIMS, ELEMENTS, (0.0, 1.0)):
        problem = AttnProblem("cuda", (9, 0), dtype, 1, 1, head_dim, head_dim, 1.0, softcap)
        config = forward_config(problem)
        for has_stairs, is_early in itertools.product((False, True), repeat=2):
            yield forward_variant(problem, config, has_stairs=has_stairs, is_early=is_early)
        with_bits = replace(problem, has_bits=True)
        yield forward_variant(with_bits, forward_config(with_bits))
        if not softcap:
            yield merge_variant(head_dim, dtype)
        preprocess, main, postprocess = backward_variants(problem)
        yield from (main, backward_variants(problem, deterministic=True)[1])
        yield backward_variants(with_bits)[1]
        yield backward_variants(with_bits, deterministic=True)[1]
        if not softcap:  # the others do not depend on it
            yield from (preprocess, postprocess)
    yield planner_variant()
    yield planner_variant(has_bits=True)
    yield split_variant()
    yield lists_variant()


def main() -> int:
    failures = []
    for variant in variants():
        start = time.perf_counter()
        try:
            compile_variant(variant)
        except CompileError as error:
            failures.append(str(error))
        print(f"{time.perf_counter() - start:6.2f} s  {variant.entry} {dict(variant.defines)}")
    try:
        os.close(launcher_build.build())
    except (OSError, subprocess.SubprocessError) as error:  # calls go without one, slower
        print(f"no launcher: {error}")
    print("\n\n".join(failures), file=sys.stderr)
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
