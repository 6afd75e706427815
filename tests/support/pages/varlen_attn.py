"""Packed tensors of three documents."""

import inspect

import torch
from torch.nn.attention.varlen import varlen_attn

HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in PyTorch 2.11

cu_seq, max_len = torch.tensor([0, 30, 50, 128], dtype=torch.int32), 78
q = torch.randn(128, 4, 64, requires_grad=True)
k, v = (torch.randn(128, 2 if HAS_GQA else 4, 64, requires_grad=True) for _ in range(2))


def adapt(text):
    return text if HAS_GQA else text.replace(", enable_gqa=True", "")
