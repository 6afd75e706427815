"""A rank of torchtitan's trainer, with a Llama 3 of a few layers on synthetic packed documents;
started by `torchtitan_runs`.

torchrun ... -m magi_bench.doors.torchtitan RUN.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig, ParallelismConfig
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from magi_bench.doors.torchtitan_runs import Run
from magi_bench.workloads import lengths
from magi_compile import _compat
from magi_compile.integrations.torchtitan import use_magi

WORDS = 512  # of the vocabulary, that occur in documents


class Documents(BaseDataLoader):
    """Packs of documents, other ones in every step; positions begin anew in each document."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        sampler: str = "seeds"

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_: Any):
        self.sampler, self.length, self.rows = config.sampler, seq_len, local_batch_size
        self.count = 0

    def _row(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(1, WORDS, (self.length + 1,), generator=generator)
        counts = lengths.sample(self.sampler, self.length, number)
        return words[:-1], torch.cat([torch.arange(x) for x in counts]), words[1:]

    def __iter__(self) -> Iterator[Any]:
        while True:
            rows = [self._row(self.count * self.rows + i) for i in range(self.rows)]
            tokens, positions, labels = map(torch.stack, zip(*rows, strict=True))
            self.count += 1
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class NoTokenizer(BaseTokenizer):
    """Stands where torchtitan asks for one; documents are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any):
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


def recipe(run: Run) -> Trainer.Config:
    """torchtitan's own trainer, compiled, with one of its attentions or ours."""
    backend = "flex" if run.attention == "magi" else run.attention
    spec = model_registry(run.flavor, attn_backend=backend)
    del spec.model.layers[run.layers :]
    config = Trainer.Config(
        model_spec=spec,
        hf_assets_path=".",
        tokenizer=NoTokenizer.Config(),
        dataloader=Documents.Config(sampler=run.lengths),
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        optimizer=default_adamw(lr=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            steps=run.steps,
            local_batch_size=1,
            seq_len=run.tokens * run.ranks,
            disable_cuda_graphs=not run.cuda_graphs,
        ),
        parallelism=ParallelismConfig(context_parallel_degree=run.ranks),
        metrics=MetricsProcessor.Config(log_freq=run.log_every),
        debug=DebugConfig(seed=run.seed, enable_structured_logging=False),
    )
    config.compile.enable = True
    return use_magi(config) if run.attention == "magi" else config


def main() -> None:
    """Trains, and the last rank writes the metrics that torchtitan logs, and how many graphs there were then."""
    run = Run(**json.loads(Path(sys.argv[1]).read_text()))
    init_logger()
    trainer = recipe(run).build()
    steps: list[dict[str, float]] = []
    logger = trainer.metrics_processor.logger
    log = logger.log

    def collect(metrics: dict[str, Any], step: int) -> None:
        counts = {"graphs": _compat.num_compiled_graphs(), "breaks": _compat.num_graph_breaks()}
        steps.append({**{name: float(x) for name, x in metrics.items()}, **counts})
        log(metrics, step)

    logger.log = collect
    trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        Path(sys.argv[2]).write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
