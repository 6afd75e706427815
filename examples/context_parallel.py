"""Trains a small transformer on packed documents over several ranks; its losses are those of one process.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

from magi_compile import create_block_mask
from magi_compile.dtensor import context_parallel

S, DIM, HEADS, WORDS = 2048, 64, 4, 64


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(S, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, WORDS)

    def forward(self, tokens, positions, labels, mask):
        x = self.words(tokens) + self.places(positions)
        q, k, v = self.qkv(x).unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        x = x + flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(x)[0], labels[0], reduction="sum")


def train(device, mesh=None):
    torch.manual_seed(0)
    model, packs = Transformer().to(device), torch.rand(8, S, device=device) < 0.01
    step, optimizer = torch.compile(model, backend="magi"), torch.optim.Adam(model.parameters())
    for document in packs.cumsum(1):
        at = torch.arange(S, device=device)
        tokens = (document * 37 + at)[None] % WORDS
        labels = tokens.roll(-1).where(document.diff(append=document[:1] - 1) == 0, -100)
        see = lambda b, h, q, kv: (document[q] == document[kv]) & (q >= kv)  # noqa: E731, B023
        mask, count = create_block_mask(see, None, None, S, S, device), (labels != -100).sum()
        cp = {"mask": mask, "buffers": [tokens, at, labels], "buffer_seq_dims": [1, 0, 1]}
        with context_parallel(mesh, **cp) if mesh else nullcontext():
            loss = step(tokens, at, labels, mask) / count
            loss.backward()
        for x in [loss.detach(), *(p.grad for p in model.parameters())] if mesh else []:
            dist.all_reduce(x, group=mesh.get_group())
        optimizer.step(), optimizer.zero_grad()
        yield loss.item()


if __name__ == "__main__":
    dist.init_process_group()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for ours, one in zip(list(train(kind, mesh)), train(kind), strict=True):
        dist.get_rank() or print(f"loss {ours:.6f}, on one process {one:.6f}")
    dist.destroy_process_group()
