"""A Llama-shaped model on packed documents, with plain FlexAttention, and its steps, on one rank or over several: their
calls, and what they are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from magi_bench.arguments import Settings
from magi_bench.clock import ALONE, Alone, Prefetched, Ready
from magi_bench.gate import Truth, truth_of_step
from magi_bench.workloads import lengths

IGNORED = -1  # as a target
WEIGHT_OF_A_TOKEN = 8192  # about the matrix products of a token, as keys that a query sees


class Shape(NamedTuple):
    layers: int
    dim: int
    ffn_dim: int
    nheads_q: int
    nheads_kv: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.nheads_q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x [B, H, S, D]`."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    """FlexAttention as a module without weights, which is what styles of context parallelism are put on."""

    def __init__(self, kernel_options: Any):
        super().__init__()
        self.kernel_options = kernel_options

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None
    ) -> Tensor:
        return flex_attention(
            query,
            key,
            value,
            block_mask=block_mask,
            enable_gqa=True,
            kernel_options=self.kernel_options,
        )


class Block(nn.Module):
    def __init__(self, shape: Shape, kernel_options: Any):
        super().__init__()
        self.heads = (shape.nheads_q, shape.nheads_kv, shape.nheads_kv)
        self.head_dim = shape.head_dim
        self.attention = Attention(kernel_options)
        self.norm1, self.norm2 = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.qkv = nn.Linear(shape.dim, sum(self.heads) * self.head_dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.up = nn.Linear(shape.dim, 2 * shape.ffn_dim, bias=False)
        self.down = nn.Linear(shape.ffn_dim, shape.dim, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Documents) -> Tensor:
        batch, seqlen, _ = x.shape
        qkv = self.qkv(x).view(batch, seqlen, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if isinstance(mask, BlockMask):
            y = self.attention(q, k, v, mask)
        else:
            y = attend_by_document(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(batch, seqlen, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: BlockMask | Documents) -> Tensor:
        x = x + self.attend(self.norm1(x), cos, sin, mask)
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Documents(NamedTuple):
    """The lengths of packed causal documents, whose tokens see all before them, or themselves and `window` before."""

    lengths: Sequence[int]
    window: int | None = None


def attend_by_document(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Causal attention of each document by itself, without FlexAttention: what others are held to."""
    parts = zip(*(x.split(list(documents.lengths), dim=2) for x in (q, k, v)), strict=True)
    window = documents.window
    if window is None:
        return torch.cat([attend(*part, is_causal=True) for part in parts], dim=2)
    # A row of a window's queries at a time, with the keys that any of them sees.
    rows = [
        attend(
            part[0][:, :, at : at + window],
            *(x[:, :, max(at - window, 0) : at + window] for x in part[1:]),
            attn_mask=in_window(at, min(at + window, part[0].shape[2]), window, q.device),
        )
        for part in parts
        for at in range(0, part[0].shape[2], window)
    ]
    return torch.cat(rows, dim=2)


def in_window(begin: int, end: int, window: int, device: torch.device) -> Tensor:
    """Bool `[end - begin, keys]` for queries from `begin` to `end`: keys begin `window` before the first query."""
    queries = torch.arange(begin, end, device=device)[:, None]
    keys = torch.arange(max(begin - window, 0), end, device=device)
    return (keys <= queries) & (queries - keys <= window)


def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """PyTorch's attention of grouped heads. In fp32 and fp64 for the query heads of one key head after another, since
    PyTorch has no kernel there that knows groups of heads and keeps scores out of memory."""
    if q.dtype in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask)
    parts = []
    for queries, key, value in zip(
        q.chunk(k.shape[1], 1), k.split(1, 1), v.split(1, 1), strict=True
    ):
        key, value = (x.expand(-1, queries.shape[1], -1, -1) for x in (key, value))
        parts.append(F.scaled_dot_product_attention(queries, key, value, **mask))
    return torch.cat(parts, 1)


def causal_in(document: Tensor, window: int | None = None) -> Any:
    """The mask_mod of causal documents, `[S]` the document of each token: a token sees all before it, or itself and
    `window` before it."""
    if window is None:
        return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)
    return lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv) & (q - kv <= window)


def causal_within(
    document: Tensor, create: Callable[..., BlockMask] = create_block_mask
) -> BlockMask:
    """The BlockMask of packed causal documents, `[S]` the document of each token, made by PyTorch's or another
    `create_block_mask`, for any number of batch entries and heads."""

    seqlen = len(document)
    return create(causal_in(document), None, None, seqlen, seqlen, device=document.device)


class Llama(nn.Module):
    """The loss is the cross-entropy of the next token, in nats; embedding and output share their weights.

    Without a `mask` it is built in here, in the graph, which is where both backends like it best. Documents in its
    place stand for attention without FlexAttention. Of tokens that are spread over ranks, `positions` says where in
    the sequence each one is, and the loss is this rank's share: the sum over its own labels, divided by the
    `num_labels` of the whole sequence.
    """

    frequencies: Tensor

    def __init__(self, shape: Shape, kernel_options: dict[str, Any] | None = None):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape, kernel_options) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        half = shape.head_dim // 2
        self.register_buffer("frequencies", 5e5 ** (-torch.arange(half) / half), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        document: Tensor,
        mask: BlockMask | Documents | None = None,
        positions: Tensor | None = None,
        num_labels: Tensor | None = None,
    ) -> Tensor:
        if mask is None:
            mask = causal_within(document)
        x = self.embedding(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = positions[:, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = self.norm(x)
        if isinstance(mask, Documents):
            return self.loss_in_parts(x, targets, num_labels)
        logits = F.linear(x, self.embedding.weight)
        given = (logits.flatten(0, 1).float(), targets.flatten())
        if num_labels is None:
            return F.cross_entropy(*given, ignore_index=IGNORED)
        return F.cross_entropy(*given, ignore_index=IGNORED, reduction="sum") / num_labels

    def loss_in_parts(self, x: Tensor, targets: Tensor, num_labels: Tensor | None) -> Tensor:
        """The loss of `x [1, S, dim]` by the logits of so many tokens at a time."""

        def part(x: Tensor, targets: Tensor) -> Tensor:
            logits = F.linear(x, self.embedding.weight).float()
            return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

        parts = zip(x[0].split(8192), targets[0].split(8192), strict=True)
        sums = [checkpoint(part, *one, use_reentrant=False) for one in parts]
        if num_labels is None:
            num_labels = (targets != IGNORED).sum()
        return torch.stack(sums).sum() / num_labels


class Pack(NamedTuple):
    """`[1, S]` tokens and targets, `IGNORED` behind a document's last token; `[S]` the document of each;
    their lengths."""

    tokens: Tensor
    targets: Tensor
    document: Tensor
    lengths: list[int]


def pack(
    settings: Settings, total: int, turn: int, device: torch.device | str, sampler: str
) -> Pack:
    """The pack of a turn, the same for everybody."""
    generator = torch.Generator().manual_seed(settings.seed + turn)
    tokens = torch.randint(settings.vocab, (1, total), generator=generator).to(device)
    counts = lengths.sample(sampler, total, settings.seed + turn)
    document = document_of(counts).to(device)
    is_followed = F.pad(document[1:] == document[:-1], (0, 1))
    return Pack(tokens, torch.where(is_followed, tokens.roll(-1, 1), IGNORED), document, counts)


def document_of(counts: list[int]) -> Tensor:
    """Int64 `[S]` on the CPU: the document of each token, of so many tokens each."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def build(
    settings: Settings, layers: int, device: torch.device | str, kernel_options: Any = None
) -> Llama:
    """The model, the same from every call and on every rank."""
    dim = settings.dim
    sizes = (layers, dim, settings.ffn_dim or 2 * dim, settings.nheads_q, settings.nheads_kv)
    torch.manual_seed(settings.seed)
    with torch.device(device):
        model = Llama(Shape(*sizes, settings.vocab), kernel_options)
    return model.to(getattr(torch, settings.dtype))


def checked_parameters(model: Llama) -> list[Tensor]:
    """Whose gradients are compared: attention's own, where a wrong mask shows most."""
    return [model.get_parameter(f"blocks.{at}.qkv.weight") for at in (0, len(model.blocks) - 1)]


def steps(
    model: Llama,
    loss_of: Callable[..., Tensor],
    ahead: Prefetched,
    which: str,
    around: Callable[[Any], AbstractContextManager[Sequence[Any]]] = nullcontext,
    world: Alone = ALONE,
) -> Ready:
    """The loss without gradients, or steps, for "fwdbwd", which also return the gradients that are checked. `ahead`
    has a pack for each call, and `around` is a context around forward and backward that gives the arguments of
    `loss_of`."""

    def forward() -> Sequence[Tensor]:
        with around(ahead.next()) as arguments, torch.no_grad():
            return [world.total(loss_of(model, *arguments))]

    def step() -> Sequence[Tensor]:
        one = ahead.next()
        model.zero_grad()
        with around(one) as arguments:
            loss = loss_of(model, *arguments)
            loss.backward()
        for weight in model.parameters() if world.size > 1 else ():
            assert weight.grad is not None
            world.total(weight.grad)
        gradients = [x.grad for x in checked_parameters(model) if x.grad is not None]
        return [world.total(loss.detach()), *gradients]

    ahead.renew(1)
    return Ready(forward if which == "fwd" else step, ahead.renew)


def truth_of(model: Llama, pack: Pack, window: int | None = None, world: Alone = ALONE) -> Truth:
    """The loss and gradients of a step of `model`, without FlexAttention, torch.compile and context parallelism: each
    rank runs whole documents. Layers run again in its backward, since one document may have the tokens of all ranks."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    device, chosen = pack.tokens.device, documents_of_rank(pack.lengths, world.rank, world.size)
    parts = torch.arange(len(pack.document), device=device).split(pack.lengths)
    positions = torch.cat([parts[i] for i in chosen]) if chosen else None
    documents = Documents([pack.lengths[i] for i in chosen], window)
    num_labels = (pack.targets != IGNORED).sum()

    def run() -> list[Tensor]:
        weights = checked_parameters(model)
        if positions is None:
            loss = torch.zeros((), device=device)
            gradients = [torch.zeros_like(x) for x in weights]
        else:
            tokens, targets = pack.tokens[:, positions], pack.targets[:, positions]
            given = tokens, targets, pack.document[positions], documents, positions, num_labels
            loss = model(*given)
            gradients = list(torch.autograd.grad(loss, weights))
        return [world.total(x) for x in (loss.detach(), *gradients)]

    return truth_of_step(model, run)


def documents_of_rank(counts: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """The documents that a rank runs, so that all have about equal work: none where there are fewer than ranks."""
    loads, chosen = [0] * num_ranks, []
    for i in sorted(range(len(counts)), key=lambda i: -counts[i]):
        least = loads.index(min(loads))
        loads[least] += counts[i] * (counts[i] + WEIGHT_OF_A_TOKEN)
        if least == rank:
            chosen.append(i)
    return sorted(chosen)
