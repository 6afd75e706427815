"""Trains a model of Qwen3-8B's shape, with random weights, on very long sequences: 512K tokens on four GPUs.

torchrun --nproc-per-node 4 examples/long_sequences.py --tokens 512K --documents 32

Needs `pip install ".[trainer]" liger-kernel`. The sequence and the weights are spread over all ranks; the inputs of
layers, and what attention returned, wait on the host for the backward. docs/long_sequences.md says what each part
saves. Without a GPU it runs over gloo at small sizes, as with `--quick`; `--check` compares with one process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Segments that grow do not fragment. PyTorch reads this when it is imported.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    DataCollatorWithFlattening,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import magi_compile.dtensor
from magi_compile.integrations.trainer import context_parallel

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
QUICK = SHAPE | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ATTENTION = torch.ops.magi.cp_ffa_fwd.default
IGNORED = -100


def make_model(args: argparse.Namespace) -> Qwen3ForCausalLM:
    """The model without memory for its weights."""
    shape = QUICK if args.quick else SHAPE
    config = Qwen3Config(**shape | {"num_hidden_layers": args.layers, "use_cache": False})
    with torch.device("meta"):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    return model.train()


@torch.no_grad()
def fill(model: Qwen3ForCausalLM, device: torch.device) -> None:
    """Random weights on the device, the same for any number of ranks; one whole weight at a time."""
    model.to_empty(device=device)
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    generator = torch.Generator(device).manual_seed(0)
    for weight in model.parameters():
        whole = torch.ones(weight.shape, device=device)
        if weight.ndim > 1:
            whole.normal_(0, 0.02, generator=generator)
        if isinstance(weight, DTensor):
            mesh, placements = weight.device_mesh, weight.placements
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            weight = weight.to_local()
        weight.copy_(whole)


def use_liger(model: Qwen3ForCausalLM, args: argparse.Namespace) -> None:
    """Norms in one kernel, the loss without logits of the whole sequence, and an MLP of some tokens at a time."""
    if args.fused != "none":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        is_all = args.fused == "all"
        apply_liger_kernel_to_qwen3(rope=False, swiglu=False, rms_norm=is_all, model=model)
    if args.tiles > 1:
        from liger_kernel.ops import apply_tiled_mlp

        for layer in model.model.layers:
            mlp = layer.mlp
            run = type(mlp).forward
            mlp.forward = partial(apply_tiled_mlp, run, mlp, num_shards=args.tiles)


class AttentionOnHost(TorchDispatchMode):
    """Sends what the attention of a checkpointed layer returns to the host, and returns it where the layer runs again.

    Args:
        kept: what one layer's attention returned; the mode of the forward fills it.
        runs_again: for the mode of the backward.
        stream: for copies beside the computation; None on a CPU.
    """

    def __init__(self, kept: list, runs_again: bool, stream: torch.cuda.Stream | None):
        super().__init__()
        self.kept, self.runs_again, self.stream = kept, runs_again, stream

    def copied(self, x: Tensor, device: torch.device | str) -> Tensor:
        pins = x.is_cuda
        to = torch.empty_like(x, device=device, pin_memory=pins)
        if self.stream is None:
            return to.copy_(x)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            to.copy_(x, non_blocking=True)
        if pins:
            x.record_stream(self.stream)
        return to

    def __enter__(self):
        if self.runs_again:  # what comes before attention hides the copies
            device = "cpu" if self.stream is None else self.stream.device
            self.coming = [[self.copied(x, device) for x in results] for results in self.kept]
            self.kept.clear()
        return super().__enter__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is not ATTENTION:
            return op(*args, **(kwargs or {}))
        if self.runs_again:
            if self.stream is not None:
                torch.cuda.current_stream().wait_stream(self.stream)
            return tuple(self.coming.pop(0))
        results = op(*args, **(kwargs or {}))
        self.kept.append([self.copied(x, "cpu") for x in results])
        return results


def use_checkpoints(
    model: Qwen3ForCausalLM, args: argparse.Namespace, device: torch.device
) -> None:
    """Layers run again in the backward, from inputs that wait on the host; attention only if it was not kept."""
    options = {"use_reentrant": False, "preserve_rng_state": False}
    if args.keep_attention == "host":
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None

        def contexts():
            kept: list = []
            return AttentionOnHost(kept, False, stream), AttentionOnHost(kept, True, stream)

        options["context_fn"] = contexts
    elif args.keep_attention == "gpu":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, [ATTENTION])
    if args.offload and device.type == "cpu":
        torch.cpu.is_available = lambda: False  # transformers would pin memory, which needs a GPU
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, offload=args.offload)


def shard_weights(model: Qwen3ForCausalLM, args: argparse.Namespace) -> None:
    """FSDP2 over all ranks: fp32 weights, gathered in the dtype of the step, gradients added up in fp32."""
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model.model.embed_tokens, model):
        fully_shard(module, mp_policy=policy)


class Magi:
    """magi_compile's context parallelism, for any documents."""

    def __init__(self, model: Qwen3ForCausalLM, accelerator: Accelerator, args: argparse.Namespace):
        self.ranks = context_parallel(accelerator, model, cp_size=dist.get_world_size())

    @contextmanager
    def spread(self, batch: dict[str, Tensor]):
        yield self.ranks.shard(batch)


class Transformers:
    """What accelerate makes of `ParallelismConfig(cp_size=...)`: PyTorch's ring over causal attention. One document."""

    def __init__(self, model: Qwen3ForCausalLM, accelerator: Accelerator, args: argparse.Namespace):
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(model)  # `is_causal=True` in place of masks
        self.mesh = dist.init_device_mesh(accelerator.device.type, (dist.get_world_size(),))
        if accelerator.device.type == "cpu":  # PyTorch has no ring of CPUs
            self.context = partial(magi_compile.dtensor.context_parallel, mask=None)
        else:
            from torch.distributed.tensor.experimental import context_parallel
            from torch.distributed.tensor.experimental._attention import set_rotate_method

            set_rotate_method(args.rotate)
            self.context = context_parallel

    @contextmanager
    def spread(self, batch: dict[str, Tensor]):
        tokens, positions = batch["input_ids"].clone(), batch["position_ids"].clone()
        labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        count = int((labels != IGNORED).sum()) / dist.get_world_size()
        buffers = [tokens, positions, labels]
        block = self.context(
            self.mesh,
            buffers=buffers,
            buffer_seq_dims=[1, 1, 1],
            no_restore_buffers=set(buffers),
        )
        with block:
            yield {
                "input_ids": tokens,
                "position_ids": positions,
                "labels": labels,
                "shift_labels": labels,
                "num_items_in_batch": count,
                "attention_mask": {"full_attention": None},
                "use_cache": False,
            }


STRATEGIES = {"magi": Magi, "transformers": Transformers}


def make_batch(args: argparse.Namespace, step: int, device: torch.device) -> dict[str, Tensor]:
    """Random tokens `[1, S]` in documents of one length, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    words = (QUICK if args.quick else SHAPE)["vocab_size"]
    tokens = torch.randint(words, (1, args.tokens), generator=generator)
    positions = torch.arange(args.tokens // args.documents).repeat(args.documents)[None]
    labels = tokens.masked_fill(positions == 0, IGNORED)
    batch = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    return {name: x.to(device) for name, x in batch.items()}


class Run:
    """The model, and what its steps take.

    Args:
        args: of the command line.
        accelerator: for its device and its group.
    """

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator):
        self.args, self.device = args, accelerator.device
        self.model = make_model(args)
        use_liger(self.model, args)
        self.strategy = STRATEGIES[args.strategy](self.model, accelerator, args)
        use_checkpoints(self.model, args, self.device)
        shard_weights(self.model, args)
        fill(self.model, self.device)
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)

    def gradients(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, float]:
        """The loss and the norm of the gradients, scalars, and the peak in the forward."""
        with self.strategy.spread(batch) as inputs:
            loss = self.model(**inputs).loss
            forward = peak_bytes(self.device)
            loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss / dist.get_world_size(), norm.full_tensor(), forward

    def steps(self) -> Iterator[SimpleNamespace]:
        """Trains on as many sequences as the run has."""
        return map(self.step, range(self.args.steps))

    def step(self, number: int, tokens: int = 0) -> SimpleNamespace:
        """Trains on one sequence, of the length of the run or of `tokens`."""
        args = argparse.Namespace(**vars(self.args) | {"tokens": tokens or self.args.tokens})
        batch = make_batch(args, number, self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begin = time.perf_counter()
        loss, norm, forward = self.gradients(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = {"loss": loss.item(), "norm": norm.item()}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        found["seconds"] = time.perf_counter() - begin
        return most_of({**found, "forward_bytes": forward, **memory_of(self.device)}, self.device)


def memory_of(device: torch.device) -> dict[str, float]:
    """The peak of this process, and what its card holds, with what PyTorch keeps and what it does not know of."""
    found = dict.fromkeys(("peak_bytes", "card_bytes"), peak_bytes(device))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["card_bytes"] = float(total - free)
    return found


def most_of(found: dict[str, float], device: torch.device) -> SimpleNamespace:
    """The largest numbers of all ranks."""
    numbers = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return SimpleNamespace(**dict(zip(found, numbers.tolist(), strict=True)))


class Times(TrainerCallback):
    """The seconds, peak and loss of each step of a Trainer, loading of its batch included, which it waits for."""

    def __init__(self) -> None:
        self.steps: list[SimpleNamespace] = []
        self.begin = self.waited = 0.0

    def on_train_begin(self, args, state, control, **_):
        self.begin = time.perf_counter()

    def on_step_begin(self, args, state, control, **_):
        self.waited = time.perf_counter() - self.begin

    def on_step_end(self, args, state, control, **_):
        device = args.device
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.begin
        found = {"seconds": seconds, "waited": self.waited, **memory_of(device)}
        self.steps.append(most_of(found, device))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.begin = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in (logs or {}):
            self.steps[-1].loss, self.steps[-1].norm = logs["loss"], logs["grad_norm"]


class ByTrainer:
    """The same steps by Hugging Face's Trainer: its FSDP2, its loop and its loader, which plans in a worker. One rank
    has no context parallelism."""

    def __init__(self, args: argparse.Namespace):
        has_gpu, world = torch.cuda.is_available(), int(os.environ["WORLD_SIZE"])
        more = {}
        if args.strategy == "transformers" and world > 1:
            from accelerate.parallelism_config import ParallelismConfig
            from accelerate.utils import TorchContextParallelConfig

            ring = TorchContextParallelConfig(cp_comm_strategy=args.rotate)
            more["parallelism_config"] = ParallelismConfig(cp_size=world, cp_handler=ring)
        layer = "Qwen3DecoderLayer"
        more |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": [layer]}}
        arguments = TrainingArguments(
            tempfile.mkdtemp(),
            per_device_train_batch_size=args.documents,
            max_steps=args.steps + 1,  # the first one compiles, and is not counted
            logging_steps=1,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            optim="adamw_torch_fused" if has_gpu else "adamw_torch",
            bf16=args.dtype == "bfloat16",
            use_cpu=not has_gpu,
            dataloader_num_workers=1,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **more,
        )
        self.args, self.device, self.model = args, arguments.device, make_model(args)
        if world == 1 and args.strategy == "magi":
            self.model.set_attn_implementation("magi")
        fill(self.model, self.device)
        use_liger(self.model, args)
        use_checkpoints(self.model, args, self.device)
        length, data = args.tokens // args.documents, []
        for step in range(args.steps + 1):
            for words in make_batch(args, step, torch.device("cpu"))["input_ids"].split(length, 1):
                data.append({"input_ids": words[0].tolist(), "labels": words[0].tolist()})
        self.times = Times()
        collator = DataCollatorWithFlattening()
        trainer = Trainer(self.model, arguments, collator, data, callbacks=[self.times])
        if args.strategy == "magi" and world > 1:
            context_parallel(trainer, cp_size=world)
        self.train = trainer.train

    def steps(self) -> list[SimpleNamespace]:
        self.train()
        return self.times.steps[1:]


def peak_bytes(device: torch.device) -> float:
    """Of this process: on a GPU what PyTorch allocated, on a CPU all its memory."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


KINDS = {
    "attention": ("ffa_", "cp_ffa", "flash", "fmha", "scaled_dot_product"),
    "between ranks": ("nccl", "gloo", "c10d", "allgather", "allreduce", "reduce_scatter"),
    "copies to the host and back": ("memcpy dtoh", "memcpy htod"),
    "matmuls": ("gemm", "nvjet", "cutlass", "gemv", "aten::mm", "addmm", "aten::bmm"),
}


def profile(run: Run) -> dict[str, float]:
    """Seconds of one more step by kind of kernel, on this rank; kinds run beside each other."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = run.device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profiler:
        run.step(run.args.steps)
    seconds = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((k for k, words in KINDS.items() if any(x in name for x in words)), "rest")
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        seconds[kind] += us / 1e6
    return seconds


def check(run: Run, say) -> None:
    """Compares the first step with plain transformers on one process, a document at a time."""
    args, batch = run.args, make_batch(run.args, 0, run.device)
    loss, _, _ = run.gradients(batch)
    ours = [x.grad.full_tensor() for x in run.model.parameters()]
    run.optimizer.zero_grad()
    if dist.get_rank() == 0:
        alone = make_model(args)
        fill(alone, run.device)
        total, length = torch.zeros((), device=run.device), args.tokens // args.documents
        for tokens in batch["input_ids"].split(length, 1):
            total = total + alone(input_ids=tokens, labels=tokens).loss / args.documents
        total.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        theirs = [x.grad for x in alone.parameters()]
        off = max(float((x - y).abs().max()) for x, y in zip(ours, theirs, strict=True))
        most = max(float(x.abs().max()) for x in theirs)
        say(f"loss {loss.item():.6f}, on one process {total.item():.6f}")
        say(f"gradients differ by at most {off:.1e} of {most:.1e}")


def write(
    path: Path, run: Run | ByTrainer, steps: list[SimpleNamespace], parts: dict[str, float]
) -> None:
    """Appends a row of magi-bench's format (docs/benchmark.md)."""
    from magi_bench.cases import Case
    from magi_bench.results import provenance
    from magi_bench.results.rows import Ledger

    args, config, world = run.args, run.model.config, dist.get_world_size()
    found = provenance.describe(run.device.type, [Path(sys.argv[0]).name, *sys.argv[1:]])
    ledger = Ledger(path)
    title = f"Steps of very long sequences, {found['device']}"
    settings = {name: x for name, x in vars(args).items() if name != "json"}
    ledger.begin({**found, "title": title, "settings": settings})
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    mask = "causal" if args.documents == 1 else "document_causal"
    case = Case(
        *("doors", mask, args.tokens // world, *heads, args.dtype),
        lengths=f"equal_{args.documents}",
        which="fwdbwd",
        layers=args.layers,
        ranks=world,
        mode="eager" if args.loop == "plain" else args.loop,
    )
    last = steps[-1]
    times = {
        "ms": last.seconds * 1e3,
        "tokens_per_s": args.tokens / last.seconds,
        "peak_bytes": int(last.peak_bytes),
    }
    outcome = {
        "label": args.strategy,
        "is_ours": args.strategy == "magi",
        "status": "ok",
        "passes": {"fwdbwd": times},
        "steps": [vars(x) for x in steps],
        "parts_s": parts,
    }
    contender = f"{args.strategy}-kept" if args.keep_attention else args.strategy
    ledger.add(case, contender, outcome)


def number(text: str) -> int:
    """512K as 524288."""
    factor = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"must be a number such as 32, 8192 or 512K, got {text!r}")
    return int(digits) * factor


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=number, help="of a step; 512K, with --quick 2K")
    add("--documents", type=number, default=1, help="of one length each")
    add("--layers", type=number, help="36, with --quick 2")
    add("--steps", type=number, default=3)
    add("--strategy", choices=STRATEGIES, default="magi", help="whose context parallelism")
    words = "this program's, or that of Hugging Face's Trainer"
    add("--loop", choices=("plain", "trainer"), default="plain", help=words)
    add("--rotate", choices=("allgather", "alltoall"), default="allgather", help="of transformers")
    add("--keep-attention", nargs="?", const="host", choices=("host", "gpu"), help="where to")
    add("--tiles", type=number, help="parts of the MLP, 1 leaves it as it is; 8, with --quick 1")
    add("--fused", choices=("all", "loss", "none"), help="kernels of liger: all, with --quick none")
    add("--offload", action=argparse.BooleanOptionalAction, default=True, help="layers' inputs")
    add("--dtype", choices=("bfloat16", "float32"), help="bfloat16, on a CPU float32")
    add("--warm-up", type=number, help="tokens of a step before, which is not counted")
    add("--quick", action="store_true", help="a small model; what runs without a GPU")
    add("--check", action="store_true", help="compare with one process first")
    add("--profile", action="store_true", help="one more step, by kind of kernel")
    add("--json", type=Path, metavar="FILE", help="append a result (needs benchmarks/)")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    args.quick = args.quick or not has_gpu
    args.tokens = args.tokens or (2048 if args.quick else 2**19)
    args.layers = args.layers or (QUICK if args.quick else SHAPE)["num_hidden_layers"]
    args.tiles = args.tiles or (1 if args.quick else 8)
    args.fused = args.fused or ("none" if args.quick else "all")
    args.dtype = args.dtype or ("bfloat16" if has_gpu else "float32")
    for name in ("tokens", "warm_up"):
        if (getattr(args, name) or 0) % args.documents:
            given, option = getattr(args, name), name.replace("_", "-")
            parser.error(
                f"--{option} must be a multiple of --documents {args.documents}, got {given}"
            )
    if args.strategy == "transformers" and args.documents > 1:
        parser.error(f"--documents must be 1 with --strategy transformers, got {args.documents}")
    if args.strategy == "transformers" and args.keep_attention:
        parser.error("--keep-attention needs --strategy magi, got transformers")
    if args.loop == "trainer" and (args.check or args.profile or args.warm_up):
        parser.error("--check, --profile and --warm-up need --loop plain, got trainer")
    if args.loop == "trainer" and args.strategy == "transformers" and not has_gpu:
        parser.error("--loop trainer needs GPUs with --strategy transformers, found none")
    for name, wanted in (("tiles", args.tiles > 1), ("fused", args.fused != "none")):
        if wanted and importlib.util.find_spec("liger_kernel") is None:
            off = {"tiles": "1", "fused": "none"}[name]
            parser.error(f"--{name} must be {off} without liger-kernel, got {getattr(args, name)}")
    if "RANK" not in os.environ:
        parser.error("processes must be started by torchrun, got one alone")
    return args


def main() -> None:
    args, begin = arguments(), time.perf_counter()
    if args.loop == "plain":
        accelerator = Accelerator(cpu=not torch.cuda.is_available())
        run: Any = Run(args, accelerator)
    else:
        run = ByTrainer(args)
    is_first = dist.get_rank() == 0

    def say(text: str) -> None:
        if is_first:
            print(f"{time.perf_counter() - begin:6.1f} s  {text}", flush=True)

    weights = sum(x.numel() for x in run.model.parameters())
    say(f"{args.strategy}: {weights / 1e9:.2f}e9 weights on {dist.get_world_size()} ranks")
    if args.check:
        check(run, say)
    if args.warm_up:
        say(f"warm-up of {args.warm_up} tokens: {run.step(0, args.warm_up).seconds:.1f} s")
    steps = []
    for i, x in enumerate(run.steps()):
        steps.append(x)
        forward = getattr(x, "forward_bytes", None)  # Trainer's loop does not say
        of_forward = "" if forward is None else f"forward {forward / 1e9:.1f}, "
        waited = f"{x.waited:.3f} s of them for its batch, " if hasattr(x, "waited") else ""
        say(
            f"step {i}: {x.seconds:.2f} s, {waited}{args.tokens / x.seconds:,.0f} tokens/s, "
            f"peak {x.peak_bytes / 1e9:.1f} GB ({of_forward}card {x.card_bytes / 1e9:.1f}), "
            f"loss {x.loss:.4f}, gradients {x.norm:.3f}"
        )
    parts = profile(run) if args.profile else {}
    if parts:
        say(", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in parts.items()))
    if args.json and is_first:
        write(args.json, run, steps, parts)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
