"""Attention through torch.compile against fp64, over everything that chooses a kernel, its tiles or its walk.

    python -m tests.lowering.sweep --device cuda --count 600 --output sweep.json

Every head dimension with every soft-cap, dtype, group of heads, gradient of lse, batch and kind of mask: all of them,
or as many as asked for, drawn at random. The tolerance is that of `tests/support/numerics.py`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from magi_compile.kernels.base import AttnProblem
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.report import REPORT
from magi_compile.masks import library, slices_from_block_mask
from tests.support.cases import AttentionInputs
from tests.support.numerics import assert_attention_close

CASES_A_FUNCTION = 8  # before Dynamo refuses to compile a function again
LENGTHS = {"short": (37, 1, 102, 160), "long": (500, 333, 4, 684)}
MASKS = {
    "everything": lambda lengths, device: None,
    "causal": lambda lengths, device: lambda b, h, q, kv: q >= kv,
    "window": lambda lengths, device: lambda b, h, q, kv: (q >= kv) & (q - kv < 70),
    "prefix": lambda lengths, device: lambda b, h, q, kv: (q >= kv) | (kv < lengths[0]),
    "padding": lambda lengths, device: lambda b, h, q, kv: (q >= kv) & (kv < lengths[2] + 100 * b),
    "documents": lambda lengths, device: library.document_full(lengths, device=device).mask_mod,
    "causal documents": lambda lengths, device: (
        library.document_causal(lengths, device=device).mask_mod
    ),
    "block-causal": lambda lengths, device: lambda b, h, q, kv: q // 48 >= kv // 48,
}


class Case(NamedTuple):
    """One attention.

    Attributes:
        head_dim: of q, k and v.
        softcap: 0.0 for none.
        dtype: of q, k and v.
        heads: of q and of k.
        with_dlse: whether the loss reads lse.
        batch: batch entries.
        mask: of `MASKS`.
        lengths: of `LENGTHS`.
    """

    head_dim: int
    softcap: float
    dtype: torch.dtype
    heads: tuple[int, int]
    with_dlse: bool
    batch: int
    mask: str
    lengths: str


HEAD_DIMS = (64, 80, 96, 128, 192, 256)
SOFTCAPS = (0.0, 5.0, 30.0)
GRID = [
    Case(*values)
    for values in itertools.product(
        HEAD_DIMS,
        SOFTCAPS,
        (torch.bfloat16, torch.float16),
        ((2, 2), (4, 2), (8, 1)),
        (False, True),
        (1, 3),
        MASKS,
        LENGTHS,
    )
]


def chosen(count: int, seed: int) -> list[Case]:
    """So many cases of the grid, every pair of a head dimension and a soft-cap equally often."""
    generator = random.Random(seed)
    groups = [
        [case for case in GRID if case[:2] == pair]
        for pair in itertools.product(HEAD_DIMS, SOFTCAPS)
    ]
    for group in groups:
        generator.shuffle(group)
    return [case for cases in zip(*groups, strict=True) for case in cases][:count]


def capped(softcap: float):
    return lambda score, b, h, q, kv: softcap * torch.tanh(score / softcap)


def attend(q, k, v, mask, score_mod):
    return flex_attention(
        q, k, v, score_mod, mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )


@functools.cache
def compiled():
    return torch.compile(attend, backend=make_backend("aot_eager"), fullgraph=True, dynamic=False)


def check(case: Case, device: str, seed: int = 0) -> str:
    """Runs a case, forward and backward.

    Returns:
        The kernel that ran it.

    Raises:
        AssertionError: with all that is off.
    """
    lengths = LENGTHS[case.lengths]
    length, batch = sum(lengths), case.batch
    mask_mod = MASKS[case.mask](lengths, device) or (lambda b, h, q, kv: q >= 0)
    mask = create_block_mask(mask_mod, batch, None, length, length, device=device)
    slices = slices_from_block_mask(mask, batch)
    torch.manual_seed(seed)
    nheads_q, nheads_kv = case.heads
    shapes = [(batch, length, nheads, case.head_dim) for nheads in (nheads_q, nheads_kv, nheads_kv)]
    q, k, v = (torch.randn(s, device=device).to(case.dtype).requires_grad_() for s in shapes)
    dout = torch.randn(shapes[0], device=device).to(case.dtype)
    dlse = torch.randn(batch, nheads_q, length, device=device)
    score_mod = capped(case.softcap) if case.softcap else None
    given = None if case.mask == "everything" else mask
    REPORT.clear()
    out, aux = compiled()(*(x.transpose(1, 2) for x in (q, k, v)), given, score_mod)
    outputs, gradients = [out], [dout.transpose(1, 2)]
    if case.with_dlse:
        outputs.append(aux.lse)
        gradients.append(dlse)
    grads = torch.autograd.grad(outputs, (q, k, v), gradients)
    packed = [x.detach().flatten(0, 1) for x in (q, k, v, dout)]
    inputs = AttentionInputs(*packed, dlse.transpose(0, 1).flatten(1))
    actual = (out.transpose(1, 2).flatten(0, 1), aux.lse.transpose(0, 1).flatten(1), *grads)
    actual = [*actual[:2], *(x.flatten(0, 1) for x in actual[2:])]
    arch = torch.cuda.get_device_capability() if device == "cuda" else None
    heads = (nheads_q, nheads_kv, case.head_dim, case.head_dim)
    scale = case.head_dim**-0.5
    problem = AttnProblem(device, arch, case.dtype, *heads, scale, case.softcap)
    assert_attention_close(
        [x.detach() for x in actual], inputs, slices, problem, with_dlse=case.with_dlse
    )
    (decision,) = REPORT.decisions
    assert decision.kernel, decision
    return decision.kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--count", type=int, default=len(GRID))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--output", help="a JSON file of the counts")
    options = parser.parse_args()
    right: Counter = Counter()
    wrong: list[dict] = []
    begin = time.perf_counter()
    for number, case in enumerate(chosen(options.count, options.seed)):
        if time.perf_counter() - begin > options.seconds:
            break
        if number % CASES_A_FUNCTION == 0:
            torch._dynamo.reset()
            compiled.cache_clear()
        try:
            kernel = check(case, options.device, number)
            right[f"{kernel}, head_dim {case.head_dim}, soft-cap {case.softcap:g}"] += 1
        except Exception as error:
            wrong.append({"case": str(case), "error": f"{type(error).__name__}: {error}"})
            print(wrong[-1], flush=True)
    for name, count in sorted(right.items()):
        print(f"{count:4d} right  {name}")
    print(f"{sum(right.values())} right, {len(wrong)} wrong")
    if options.output:
        device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        record = {"device": device, "torch": torch.__version__, "command": " ".join(sys.argv[1:])}
        with open(options.output, "w") as file:
            json.dump(
                {**record, "right": dict(sorted(right.items())), "wrong": wrong}, file, indent=1
            )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
