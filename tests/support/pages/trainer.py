"""Trainings of one rank, on what accelerate makes of a process group that is there."""

import os
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,  # noqa: F401
    TrainingArguments,
)

os.environ.update(
    RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0"
)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
accelerator, cp_size = Accelerator(cpu=True), 1
sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, **sizes))
data = [{"input_ids": [*range(n)], "labels": [*range(n)]} for n in (20, 30, 9, 31)]
args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=1, report_to="none")
loader = DataLoader(data, batch_size=2, collate_fn=DataCollatorWithFlattening())
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def adapt(text):
    """With the only rank that is there."""
    return text.replace("cp_size=8", "cp_size=1")
