"""Trains torchtitan's small Llama 3 on packed documents, with attention on our kernels; on a GPU or a CPU,
without downloads.

pip install ".[torchtitan]"
python examples/torchtitan_packed.py --compile.enable
torchrun --nproc-per-node 2 examples/torchtitan_packed.py --parallelism.context_parallel_degree 2
"""

# ruff: noqa: E402  (a CPU has to be prepared before torchtitan is imported)
import os
import resource
import sys
import types
from dataclasses import dataclass

import torch


def on_a_cpu():
    """torchtitan trains on accelerators; this gives CPUs what it asks of them. Before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(name="cpu", total_memory=memory)

    def memory_stats(device=None):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        names = ("active_bytes.all.peak", "reserved_bytes.all.peak")
        return {**dict.fromkeys(names, peak), "num_alloc_retries": 0, "num_ooms": 0}

    for name, function in {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: properties,
        "current_device": lambda: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": memory_stats,
    }.items():
        setattr(torch.cpu, name, function)

    import torchtitan.distributed.fsdp as fsdp
    from torch.distributed.fsdp import FSDPModule

    without_division = fsdp.disable_fsdp_gradient_division

    def disable_fsdp_gradient_division(model):
        without_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    fsdp.disable_fsdp_gradient_division = disable_fsdp_gradient_division


if not torch.cuda.is_available():
    on_a_cpu()

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig, ParallelismConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from magi_compile.integrations.torchtitan import use_magi

WORDS, STEPS = 512, 10


class Documents(BaseDataLoader):
    """Packed documents of random length; each goes up in steps of its own from a word of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        mean_length: int = 100
        infinite: bool = True  # torchtitan's Validator sets it

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        self.mean_length, self.length, self.rows = config.mean_length, seq_len, local_batch_size
        self.world, self.rank, self.count = dp_world_size, dp_rank, 0

    def row(self, number):
        """Tokens, positions and labels: the same row for whoever gets it."""
        generator = torch.Generator().manual_seed(number)
        parts = []
        while sum(len(part[0]) for part in parts) < self.length:
            length = 2 + int(self.mean_length * torch.empty(1).exponential_(generator=generator))
            first, step = torch.randint(1, WORDS, (2,), generator=generator)
            words = (first + step * torch.arange(length + 1)) % WORDS
            parts.append((words[:-1], torch.arange(length), words[1:]))
        return [torch.cat(pieces)[: self.length] for pieces in zip(*parts, strict=True)]

    def __iter__(self):
        while True:
            begin = (self.count * self.world + self.rank) * self.rows
            rows = [self.row(begin + i) for i in range(self.rows)]
            tokens, positions, labels = map(torch.stack, zip(*rows, strict=True))
            self.count += 1
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()
        self.eos_id = 0

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return WORDS


def recipe(spec=None):
    """What torchtitan trains without us; `spec` is a model of torchtitan's."""
    spec = spec or model_registry("debugmodel", attn_backend="flex")
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=".",
        tokenizer=NoTokenizer.Config(),
        dataloader=Documents.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            steps=STEPS, local_batch_size=2, seq_len=256, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )


def packed():
    """The recipe that the command line below names."""
    return use_magi(recipe())


if __name__ == "__main__":
    import torchtitan.train

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    sys.argv[1:1] = ["--module", "torchtitan_packed", "--config", "packed"]
    torchtitan.train.main()
