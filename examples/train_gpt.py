"""Trains a byte-level GPT on packed documents with plain FlexAttention, compiled with backend="magi".

The documents are the functions and classes of the Python installation that runs this. Every sequence packs many of
them; a token sees the earlier tokens of its own document. The same model with a dense mask and
scaled_dot_product_attention, from the same seed, is trained beside it: the loss curves agree. A picture shows the mask
of the first sequence. On a GPU, `--baseline flex` compares with PyTorch's own compiled FlexAttention instead, and
`--cuda-graphs` takes Python out of the compiled steps.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from tqdm import tqdm

import magi_compile
from magi_compile.masks import plot, slices_from_block_mask


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding of `x [B, H, S, D]` by `angles [S, D / 2]`."""
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, dim: int, nheads_q: int, nheads_kv: int):
        super().__init__()
        self.heads = (nheads_q, nheads_kv, nheads_kv)
        self.head_dim = dim // nheads_q
        self.qkv = nn.Linear(dim, sum(self.heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: BlockMask | Tensor) -> Tensor:
        batch, seqlen, _ = x.shape
        qkv = self.qkv(x).view(batch, seqlen, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        q, k = rotate(q, angles), rotate(k, angles)
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(batch, seqlen, -1))


class Block(nn.Module):
    def __init__(self, dim: int, nheads_q: int, nheads_kv: int):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, nheads_q, nheads_kv)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, angles: Tensor, mask: BlockMask | Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles, mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A transformer over bytes; the loss is the cross-entropy of the next byte, in nats.

    `make_mask` turns the document of each token, `[S]`, into what the attention takes. A BlockMask is built in here, in
    the graph, so backend="magi" takes its meaning and skips building it.
    """

    def __init__(
        self,
        dim: int,
        nlayers: int,
        nheads_q: int,
        nheads_kv: int,
        make_mask: Callable[[Tensor], BlockMask | Tensor],
    ):
        super().__init__()
        self.make_mask = make_mask
        self.embedding = nn.Embedding(256, dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, nheads_q, nheads_kv) for _ in range(nlayers))
        self.norm = nn.RMSNorm(dim)
        half = dim // nheads_q // 2
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, document: Tensor) -> Tensor:
        mask = self.make_mask(document)
        x = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = positions[:, None] * self.frequencies
        for block in self.blocks:
            x = block(x, angles, mask)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)


def packed_documents(seqlen: int, seed: int):
    """Yields (tokens [1, S], targets [1, S], document of each token [S]).

    A document is a part of a file at the top level, such as a function, and at most a quarter of a pack. It is cut
    where a pack ends.
    """
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(seed).shuffle(paths)
    parts = re.compile(rb"^(?=def |class |@)", re.MULTILINE)
    texts = (text for path in itertools.cycle(paths) for text in parts.split(path.read_bytes()))
    pieces = (text[i : i + seqlen // 4] for text in texts for i in range(0, len(text), seqlen // 4))
    tokens, documents = [], []
    for number, piece in enumerate(pieces):
        tokens.extend(piece)
        documents.extend([number] * len(piece))
        while len(tokens) > seqlen:
            pack = torch.tensor(tokens[: seqlen + 1])
            document = torch.tensor(documents[: seqlen + 1])
            # The last byte of a document has no next byte to predict.
            targets = torch.where(document[1:] == document[:-1], pack[1:], -1)
            yield pack[None, :-1], targets[None], document[:-1]
            tokens, documents = tokens[seqlen:], documents[seqlen:]


def block_mask(document: Tensor) -> BlockMask:
    def document_causal(b, h, q, kv):
        return (document[q] == document[kv]) & (q >= kv)

    seqlen = len(document)
    return create_block_mask(document_causal, None, None, seqlen, seqlen, device=document.device)


def dense_mask(document: Tensor) -> Tensor:
    return (document[:, None] == document[None, :]).tril()


def train(name: str, args: argparse.Namespace, make_mask, backend: str | None) -> list[float]:
    """Trains one model from the seed and returns its losses."""
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    model = GPT(args.dim, args.layers, args.heads, args.kv_heads, make_mask).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    mode = "reduce-overhead" if args.cuda_graphs else None
    step = torch.compile(model, backend=backend, mode=mode, fullgraph=True) if backend else model
    packs, losses, seconds = packed_documents(args.seqlen, args.seed), [], []
    with tqdm(range(args.steps), desc=f"{name:>18}", unit="step") as bar:
        if backend:
            bar.set_postfix_str("compiling")
        for _ in bar:
            tokens, targets, document = (tensor.to(device) for tensor in next(packs))
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = step(tokens, targets, document)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            rate = args.seqlen / sorted(seconds)[len(seconds) // 2]
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s")
    return losses


def explain(args: argparse.Namespace) -> None:
    """Prints what becomes of every attention of the model on the first pack."""
    tokens, targets, document = (
        t.to(args.device) for t in next(packed_documents(args.seqlen, args.seed))
    )
    model = GPT(args.dim, args.layers, args.heads, args.kv_heads, block_mask).to(args.device)
    with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
        print(magi_compile.explain(model, tokens, targets, document))


def draw(args: argparse.Namespace) -> None:
    """Saves a picture of the mask of the first pack."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    _, _, document = next(packed_documents(args.seqlen, args.seed))
    slices = slices_from_block_mask(block_mask(document))
    figure, axes = pyplot.subplots(figsize=(5, 5), layout="constrained")
    plot(slices, axes, title=f"{len(slices)} documents packed into {args.seqlen} tokens")
    figure.savefig(args.picture, dpi=150)
    print(f"\nThe mask of the first sequence: {args.picture}")


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=DEVICES[-1])
    parser.add_argument("--steps", type=positive, default=30)
    parser.add_argument("--seqlen", type=positive, help="4096, on a CPU 2048")
    parser.add_argument("--dim", type=positive, default=256)
    parser.add_argument("--layers", type=positive, help="4, on a CPU 2")
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--kv-heads", type=positive, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--baseline", choices=("dense", "flex"), default="dense")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay compiled steps")
    parser.add_argument("--picture", type=Path, default=Path("train_gpt_mask.png"))
    parser.add_argument(
        "--explain", action="store_true", help="tell what becomes of each attention"
    )
    args = parser.parse_args()
    if args.dim % args.heads:
        parser.error(f"--dim must be a multiple of --heads {args.heads}, got {args.dim}")
    if args.heads % args.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads {args.kv_heads}, got {args.heads}")
    if args.device not in DEVICES:
        parser.error(f"--device must be one of {', '.join(DEVICES)} here, got {args.device!r}")
    is_cpu = args.device == "cpu"
    args.seqlen = args.seqlen or (2048 if is_cpu else 4096)
    args.layers = args.layers or (2 if is_cpu else 4)
    if args.explain:
        return explain(args)

    print(
        f"{args.steps} steps of {args.seqlen} packed bytes on {args.device}, torch {torch.__version__}"
    )
    ours = train('backend="magi"', args, block_mask, backend="magi")
    print(magi_compile.lowering_report())
    if args.baseline == "dense":
        theirs = train("dense-mask SDPA", args, dense_mask, backend=None)
    else:
        theirs = train("FlexAttention", args, block_mask, backend="inductor")

    print(f"\n{'step':>6} {'magi':>9} {args.baseline:>9} {'difference':>12}")
    for i in sorted({*range(0, args.steps, max(1, args.steps // 8)), args.steps - 1}):
        print(f"{i:6} {ours[i]:9.4f} {theirs[i]:9.4f} {ours[i] - theirs[i]:12.1e}")
    draw(args)


if __name__ == "__main__":
    main()
