"""A process group of one rank, where the page has several on GPUs, and a model with attention."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh  # noqa: F401
from torch.distributed.tensor import Shard  # noqa: F401
from torch.distributed.tensor.parallel import (  # noqa: F401
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

S, H, D = 128, 2, 64
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def adapt(text):
    text = text.replace('"cuda"', '"cpu"').replace("(2, 2, 2)", "(1, 1, 1)")
    return text.replace('backend="magi"', 'backend="eager"')


def causal(b, h, q, kv):
    return q >= kv


def make_mask(mask_mod, queries=S, keys=S):
    return create_block_mask(mask_mod, None, None, queries, keys, device="cpu")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(H * D, H * D) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.embedding = nn.Embedding(S, H * D)

    def forward(self, tokens, positions, labels, mask):
        x = self.embedding(tokens) + self.embedding(positions)
        return sum(layer.attention(x, mask) for layer in self.layers).square().sum()


model = Model()
tokens, positions, labels = torch.randint(S, (1, S)), torch.arange(S), torch.randint(S, (1, S))
document = torch.arange(S) // 50
block_mask = mask = full_mask = make_mask(causal)
window_mask = make_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 16))
batches = [(tokens, positions, labels, block_mask)]
table = torch.randn(S, D)
loss, logits = torch.tensor(1.0), torch.randn(1, S, 4)
q, k, v = (torch.randn(1, H, S, D) for _ in range(3))

WORDS = 32
text_mask = cross_mask = make_mask(lambda b, h, q, kv: kv < WORDS - 4, keys=WORDS)
encoder_mask, decoder_mask = make_mask(lambda b, h, q, kv: kv < WORDS, WORDS, WORDS), mask
video, text = torch.randn(1, S, D), torch.randn(1, WORDS, D)
