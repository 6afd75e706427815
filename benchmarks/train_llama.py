"""A Llama-shaped model on packed documents: backend="magi" beside compiled FlexAttention.

    python benchmarks/train_llama.py --output benchmarks/results/training_h200_2026-11-22

One model for each contender, from the same seed, of about 1B parameters with random weights, AdamW. Every step
packs other documents, so a layout never comes twice; a step is mask, forward, backward and optimizer. Contenders take
turns step by step, and the median step counts. Their losses must agree in the first step of every layout. Graphs that
Dynamo compiles after a layout's first steps are counted: a new layout is to cost none.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import record
import torch
import torch.nn.functional as F
from torch import Tensor

from magi_compile._compat import num_compiled_graphs
from magi_compile.bench.workloads.llama import Llama, Shape

# Mean and largest length of a document as shares of the pack, and how much lengths vary (log-normal).
LAYOUTS = {
    "short": (1 / 64, 1 / 16, 0.5),
    "mixed": (1 / 8, 1 / 2, 1.0),
    "long": (1 / 2, 1, 0.3),
    "one": (1, 1, 0.0),
}
BACKENDS = {"magi": "magi", "flex": "inductor", "flex_flash": "inductor"}
LOSS_TOLERANCE = 0.02


class Pack(NamedTuple):
    tokens: Tensor  # [1, S]
    targets: Tensor  # [1, S], -1 where the next token is another document's
    document: Tensor  # [S]


def make_pack(layout: str, seqlen: int, vocab: int, seed: int, device: torch.device) -> Pack:
    """Random tokens in documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    mean, largest, spread = LAYOUTS[layout]
    lengths: list[int] = []
    while (left := seqlen - sum(lengths)) > 0:
        factor = math.exp(spread * torch.randn((), generator=generator).item())
        lengths.append(max(1, min(round(factor * mean * seqlen), round(largest * seqlen), left)))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens = torch.randint(vocab, (1, seqlen), generator=generator)
    is_followed = F.pad(document[1:] == document[:-1], (0, 1))
    targets = torch.where(is_followed, tokens.roll(-1, 1), -1)
    return Pack(*(tensor.to(device) for tensor in (tokens, targets, document)))


class Contender:
    """A model, its optimizer and its compiled step."""

    def __init__(self, name: str, shape: Shape, device: torch.device, dtype: torch.dtype):
        torch.manual_seed(0)
        options = {"BACKEND": "FLASH"} if name == "flex_flash" else None
        self.model = Llama(shape, options).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.loss = torch.compile(self.model, backend=BACKENDS[name], fullgraph=True)

    def step(self, pack: Pack) -> float:
        loss = self.loss(pack.tokens, pack.targets, pack.document)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state_bytes(self) -> int:
        """Of weights and of the optimizer's moments, what a step starts with."""
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        return sum(x.nbytes for x in (*self.model.parameters(), *moments))


class Meter:
    """Time and memory of one step at a time."""

    def __init__(self, device: torch.device):
        self.is_cuda = device.type == "cuda"

    def __call__(self, contender: Contender, pack: Pack) -> tuple[float, float, float | None]:
        """Loss, seconds, and GiB at the peak as if nobody else held memory (None on a CPU)."""
        before = 0
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        loss = contender.step(pack)  # waits for the device
        seconds = time.perf_counter() - start
        if not self.is_cuda:
            return loss, seconds, None
        grown = torch.cuda.max_memory_allocated() - before
        return loss, seconds, (grown + contender.state_bytes()) / 2**30


def measure(layout: str, contenders: dict[str, Contender], args: argparse.Namespace) -> dict:
    """One row: every contender on the same packs of one layout, in turns."""
    device = torch.device(args.device)
    meter = Meter(device)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    gib: dict[str, list[float]] = {name: [] for name in contenders}
    compiled_before = num_compiled_graphs()
    for step in range(-args.warmup, args.steps):
        if step == 0:
            compiled_before = num_compiled_graphs()
        pack = make_pack(layout, args.seqlen, args.vocab, seed=step, device=device)
        losses = {}
        for name, contender in contenders.items():
            losses[name], elapsed, peak = meter(contender, pack)
            if step >= 0:
                seconds[name].append(elapsed)
                if peak is not None:
                    gib[name].append(peak)
        if step == -args.warmup:
            spread = max(losses.values()) - min(losses.values())
            assert spread < LOSS_TOLERANCE, f"losses of the first step differ: {losses}"
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "layout": layout,
        "documents": int(pack.document[-1]) + 1,
        "step_ms": {name: round(1e3 * value, 1) for name, value in medians.items()},
        "tokens_per_s": {name: round(args.seqlen / value) for name, value in medians.items()},
        "peak_gib": {name: round(max(values), 2) for name, values in gib.items() if values},
        "graphs_compiled_after_warmup": num_compiled_graphs() - compiled_before,
    }


def to_markdown(context: dict, rows: list[dict], names: list[str]) -> str:
    lines = ["# Training a Llama-shaped model on packed documents", ""]
    lines += [f"- {name}: {value}" for name, value in context.items()]
    header = ["layout", "documents", *(f"{name}, ms" for name in names)]
    header += [f"{name}, tokens/s" for name in names] + [f"{name}, GiB" for name in names]
    header += ["graphs compiled after warm-up"]
    lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        cells = [row["layout"], row["documents"]]
        cells += [
            row[key].get(n, "-") for key in ("step_ms", "tokens_per_s", "peak_gib") for n in names
        ]
        cells.append(row["graphs_compiled_after_warmup"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write: adds .json and .md")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--contenders", nargs="+", choices=BACKENDS, default=["magi", "flex"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--ffn-dim", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()

    device = torch.device(args.device)
    shape = Shape(args.layers, args.dim, args.ffn_dim, args.heads, args.kv_heads, args.vocab)
    dtype = getattr(torch, args.dtype)
    contenders = {name: Contender(name, shape, device, dtype) for name in args.contenders}
    parameters = sum(x.numel() for x in contenders[args.contenders[0]].model.parameters())
    context = record.context(
        model=f"{parameters / 1e9:.2f}B parameters, {shape}, {args.dtype}, AdamW",
        tokens_a_step=args.seqlen,
        timing=f"median of {args.steps} steps, contenders in turns, host clock around a step",
    )
    rows = []
    for layout in args.layouts:
        rows.append(measure(layout, contenders, args))
        print(json.dumps(rows[-1]), flush=True)
        record.write(args.output, context, rows, to_markdown(context, rows, args.contenders))


if __name__ == "__main__":
    main()
