"""Trains small models of torchtitan, in an environment that has it, and writes down what happened:

python -m tests.integrations.torchtitan_runs RESULTS.json "llama3 compile" "llama3 cp=2 steps=4"

Each run has processes of its own, which begin as copies of this one, so that torchtitan is imported once.
"""

# ruff: noqa: E402  (the example prepares a CPU before torchtitan is imported)
from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
import types
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # as in tests/conftest.py

_spec = importlib.util.spec_from_file_location(
    "torchtitan_packed", Path(__file__).parents[2] / "examples" / "torchtitan_packed.py"
)
example = importlib.util.module_from_spec(_spec)
sys.modules["torchtitan_packed"] = example
_spec.loader.exec_module(example)  # also makes a CPU do for torchtitan

import torchtitan.trainer
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

import magi_compile.dtensor.call.ops
import magi_compile.integrations.torchtitan
from magi_compile.integrations.torchtitan import use_magi
from magi_compile.kernels.cpu import CpuKernel

SECONDS = 600  # for a run
DENSE = f"{__name__ if __name__ != '__main__' else 'tests.integrations.torchtitan_runs'}.dense"


# Attention by torchtitan's own mask, dense: what is right


class DenseAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def __init__(self, config: Config):
        super().__init__()

    def forward(
        self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, out_transform=None, **_
    ):
        batch, length, heads, dim = q_BLNH.shape
        groups = heads // k_BLNH.shape[2]
        k, v = (x.repeat_interleave(groups, 2) for x in (k_BLNH, v_BLNH))
        device = q_BLNH.device
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        at = torch.arange(length, device=device)
        visible = attention_masks.mask_mod(b, torch.zeros_like(at[0]), at.view(-1, 1), at)
        scores = torch.einsum("blnh,bmnh->bnlm", q_BLNH, k) * (scale or dim**-0.5)
        scores = scores.masked_fill(~visible, -torch.inf)
        out = torch.einsum("bnlm,bmnh->blnh", scores.softmax(-1), v)
        if out_transform is None:
            return out
        return out_transform(out, scores.logsumexp(-1).transpose(1, 2))


@override(target=FlexAttention.Config, fqns=["*.attention.inner_attention"])
def dense(cfg):
    return derive(cfg, DenseAttention.Config)


def use_dense(config):
    config.override.imports = [DENSE]
    return config


# What is trained

MODELS = {
    "llama3": lambda: llama3.model_registry("debugmodel", attn_backend="flex"),
    "qwen3": lambda: qwen3.model_registry("debugmodel", attn_backend="flex"),
    "gpt_oss": lambda: gpt_oss.model_registry("debugmodel", attn_backend="flex"),
    "gpt_oss_varlen": lambda: gpt_oss.model_registry("debugmodel", attn_backend="varlen"),
    "deepseek_v3": lambda: deepseek_v3.model_registry("debugmodel", attn_backend="flex"),
}


def make_config(words: list[str]) -> Any:
    """The config of a run such as `llama3 cp=2 compile steps=4`."""
    model, *rest = words
    given = dict(word.split("=") if "=" in word else (word, "") for word in rest)
    spec = MODELS[model]()
    del spec.model.layers[int(given.get("layers", len(spec.model.layers))) :]
    config = example.recipe(spec)
    if "dense" in given:
        use_dense(config)
    else:
        use_magi(config, **json.loads(given.get("options", "{}")))
    config.training.mixed_precision_param = "bfloat16" if "bf16" in given else "float32"
    config.training.steps = int(given.get("steps", 20))
    config.training.disable_cuda_graphs = "graphs" not in given
    config.compile.enable = "compile" in given
    config.compile.backend = given.get("backend", "inductor")
    parallelism = config.parallelism
    parallelism.context_parallel_degree = int(given.get("cp", 1))
    parallelism.tensor_parallel_degree = int(given.get("tp", 1))
    parallelism.pipeline_parallel_degree = int(given.get("pp", 1))
    parallelism.spmd_backend = given.get("spmd", "spmd_types")
    if "balancer" in given:
        name = given["balancer"]
        parallelism.context_parallel_load_balancer = None if name == "None" else name
    if "dp" in given:
        config.training.local_batch_size //= int(given["dp"])
    if "seq" in given:
        config.training.seq_len = int(given["seq"])
    if "typecheck" in given:
        config.debug.spmd_typechecking = True
        config.activation_checkpoint = None
    if given.get("ac") == "full":
        config.activation_checkpoint = FullAC.Config()
    elif given.get("ac") == "none":
        config.activation_checkpoint = None
    return config


@dataclass
class Record:
    """What a run did.

    Attributes:
        losses: of each step.
        forwards: of attention, on this rank.
        backwards: of attention, on this rank.
        planned: batches that had their plan before torchtitan moved them to the device.
        graphs: how many there were after each step.
        breaks: of graphs.
        error: what it raised, if that ended it.
    """

    losses: list[float] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    planned: int = 0
    graphs: list[int] = field(default_factory=list)
    breaks: int = 0
    error: str = ""


calls: Counter[str] = Counter()


def count_calls() -> None:
    """Counts attention, of one rank or across ranks; the stages of the latter are calls of a kernel too."""
    depth = 0

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            calls[name] += depth == 0
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return call

    for owner in (magi_compile.dtensor.call.ops, CpuKernel):
        for name in ("forward", "backward"):
            setattr(owner, name, counted(name, getattr(owner, name)))

    post = torchtitan.trainer.Trainer.post_dataloading_process

    def post_dataloading_process(self: Any, batch: Any, *rest: Any) -> Any:
        calls["planned"] += magi_compile.integrations.torchtitan._this_batch.get() is not None
        return post(self, batch, *rest)

    torchtitan.trainer.Trainer.post_dataloading_process = post_dataloading_process


def fill(model: torch.nn.Module) -> None:
    """Weights that depend on their names alone, however they are sharded and wrapped."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.replace("_checkpoint_wrapped_module.", "")
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=generator).to(parameter.device) * 0.05
            if parameter.ndim == 1:
                values += 1
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                values = distribute_tensor(values, mesh, placements, src_data_rank=None)
            parameter.copy_(values)


def train(name: str, record: Record) -> None:
    """Trains as `name` says."""
    counters = torch._dynamo.utils.counters
    trainer = make_config(name.split()).build()
    for part in trainer.model_parts:
        fill(part)

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        record.losses.append(loss)
        record.graphs.append(counters["stats"]["unique_graphs"])

    trainer.metrics_processor.log = log
    trainer.train()
    record.forwards, record.backwards = calls["forward"], calls["backward"]
    record.planned = calls["planned"]
    record.breaks = sum(counters["graph_break"].values())
    trainer.close()


def run_rank(name: str, rank: int, world: int, port: int, results: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    record = Record()
    try:
        train(name, record)
    except Exception as error:
        traceback.print_exc()
        record.error = f"{type(error).__name__}: {error}"
    if rank == world - 1:  # the last stage of a pipeline has the loss
        results.write_text(json.dumps(asdict(record)))
    os._exit(bool(record.error))  # no rank waits for one that has failed


def run(name: str) -> dict[str, Any]:
    """Trains in as many processes as `name` asks for; the record of the last rank."""
    given = dict(word.split("=") for word in name.split() if "=" in word)
    world = math.prod(int(given.get(axis, 1)) for axis in ("cp", "tp", "pp", "dp"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results, fork = Path(folder, "record.json"), multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=run_rank, args=(name, rank, world, port, results))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + SECONDS
        for process in ranks:
            process.join(max(end - time.monotonic(), 0))
            process.kill()
        if results.exists():
            return json.loads(results.read_text())
        return asdict(Record(error=f"no end after {SECONDS} seconds"))


def main() -> None:
    results, *names = sys.argv[1:]
    torch.set_num_threads(1)
    quick = {"perf_counter": time.perf_counter, "sleep": lambda seconds: None}
    torchtitan.trainer.time = types.SimpleNamespace(**quick)  # it waits 2 seconds behind each run
    count_calls()
    records = {}
    for name in names:
        records[name] = run(name)
        Path(results).write_text(json.dumps(records))


if __name__ == "__main__":
    main()
