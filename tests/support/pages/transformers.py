"""A small model on disk, and a process group of one rank."""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

S, device = 128, "cpu"
name = tempfile.mkdtemp()
sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, **sizes)
LlamaForCausalLM(config).save_pretrained(name)
tokens = torch.randint(32, (1, S))
positions = torch.arange(S)[None]
labels, num_labels = tokens.clone(), S
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def mask_mod(b, h, q, kv):
    return q >= kv


def adapt(text):
    """Without Inductor, which takes a minute."""
    eager = '__import__("magi_compile").make_backend("eager")'
    return text.replace('backend="magi"', f"backend={eager}")
