"""Trainings of tiny models by Trainer, SFTTrainer and accelerate, in one process or over ranks, and their numbers."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import magi_compile
from magi_compile.dtensor import ContextParallelOptions
from magi_compile.integrations.trainer import ContextParallelMixin, context_parallel

WORDS = 97
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
OPTIONS = ContextParallelOptions(chunk_size=16)


def config_of(name: str) -> Any:
    if name == "llama":
        return hf.LlamaConfig(**SMALL)
    if name == "gemma3":
        return hf.Gemma3TextConfig(**SMALL, **MIXED, query_pre_attn_scalar=16)
    if name == "phi3":  # two of three batches have positions beyond 64, on one of two ranks
        size = SMALL["head_dim"] // 2
        factors = {"short_factor": [1.0] * size, "long_factor": [2.0] * (size - 1) + [9.0]}
        rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
        lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
        small = {**SMALL, **lengths, "hidden_size": 64, "initializer_range": 0.2}
        return hf.Phi3Config(**small, rope_parameters={**rope, **dict([*lengths.items()][1:])})
    if name == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        small = {**SMALL, "max_position_embeddings": 30, "initializer_range": 0.2}
        return hf.LlamaConfig(**small, rope_parameters=rope)
    if name == "gemma2":
        return hf.Gemma2Config(
            **SMALL, **MIXED, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
        )
    if name == "llama4":
        chunks = {"attention_chunk_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 2}
        kinds = {"layer_types": ["chunked_attention", "full_attention"]}
        return hf.Llama4TextConfig(**SMALL, **chunks, **kinds, interleave_moe_layer_step=4)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None}
    return hf.GptOssConfig(**SMALL, **MIXED, **experts)


# The attention of transformers itself, but for gpt-oss, where all but "magi" mix documents.
PLAIN = {
    "llama": "sdpa",
    "phi3": "sdpa",
    "dynamic": "sdpa",
    "gemma2": "eager",
    "gemma3": "eager",
    "llama4": "eager",
    "gpt_oss": "magi",
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(
        config_of(name), attn_implementation=PLAIN[name], dtype=torch.float32
    )
    for key, parameter in model.named_parameters():
        if "sinks" in key:
            torch.nn.init.normal_(parameter)
    return model


def documents(number: int, seed: int) -> list[dict[str, list[int]]]:
    order = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 70, (number,), generator=order).tolist()
    words = [torch.randint(3, WORDS, (length,), generator=order).tolist() for length in lengths]
    return [{"input_ids": x, "labels": x} for x in words]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Rows of one length with an `attention_mask`."""
    length = max(len(x["input_ids"]) for x in rows)
    tokens = torch.tensor([x["input_ids"] + [0] * (length - len(x["input_ids"])) for x in rows])
    labels = tokens.masked_fill(tokens == 0, -100)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def without_labels(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return {name: x for name, x in padded(rows).items() if name != "labels"}


class Logs(hf.TrainerCallback):
    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        names = ("loss", "grad_norm", "eval_loss", "eval_correct", "num_input_tokens_seen")
        self.found.append({name: x for name, x in logs.items() if name in names})


def correct(prediction: Any) -> dict[str, float]:
    guess, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    return {"correct": float(((guess == labels) & (labels != -100)).sum())}


def folder_of_all() -> str:
    """One new folder for all ranks."""
    shared = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(shared)
    return shared[0]


def arguments_of(cp: int, **more: Any) -> dict[str, Any]:
    groups = (dist.get_world_size() if dist.is_initialized() else 1) // cp
    return {
        "per_device_train_batch_size": 8 // groups,
        "per_device_eval_batch_size": 4 // groups,
        "learning_rate": 0.3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 3,
        "use_cpu": True,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        **more,
    }


def keeps_attention() -> Any:
    """The contexts of a checkpoint that runs everything again but attention over ranks."""
    return create_selective_checkpoint_contexts([torch.ops.magi.cp_ffa_fwd.default])


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(documents(self.size, 1))


class OwnTrainer(ContextParallelMixin, hf.Trainer):
    pass


def by_trainer(
    cp: int,
    name: str,
    *,
    pad: bool = False,
    metrics: bool = False,
    resume: bool = False,
    mixin: bool = False,
    lora: bool = False,
    compiled: bool = False,
    in_config: bool = False,
    stream: bool = False,
    tp: int = 1,
    options: ContextParallelOptions = OPTIONS,
    **more: Any,
) -> list[dict[str, Any]]:
    """What a Trainer logs, then its predictions where `metrics`, then sums of its weights."""
    folder = folder_of_all()
    tp = tp if cp > 1 else 1
    if resume:
        more |= {"save_strategy": "steps", "save_steps": 2}
    if compiled and cp > 1:
        magi_compile.enable()
        more |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    if in_config and cp > 1:
        more |= {"parallelism_config": parallelism_config(cp)}
    if stream and cp == 1:  # else process 0 hands out batches, whose rows are as long as each other
        more |= {"accelerator_config": {"dispatch_batches": False}}
    size = 48 if more.get("gradient_accumulation_steps", 1) > 1 else 24

    def made() -> tuple[Any, Logs]:
        model, logs = model_of(name), Logs()
        if lora:
            model = with_lora(model)
        if tp > 1:
            model = split_by_transformers(model, tp)
        given = {
            "model": model,
            "args": hf.TrainingArguments(folder, **arguments_of(cp * tp, **more)),
            "train_dataset": Stream(size) if stream else documents(size, 1),
            "eval_dataset": documents(14, 2),
            "data_collator": padded if pad else hf.DataCollatorWithFlattening(),
            "callbacks": [logs],
            "compute_metrics": correct if metrics else None,
        }
        if cp > 1 and mixin:
            return OwnTrainer(**given, cp_size=cp, options=options), logs
        trainer = hf.Trainer(**given)
        if cp > 1:
            assert (
                context_parallel(trainer, cp_size=None if in_config else cp, options=options)
                is trainer
            )
        return trainer, logs

    trainer, logs = made()
    trainer.train()
    found = logs.found
    if resume:
        trainer, logs = made()
        trainer.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-2"))
        found = [*found[:2], *logs.found]
    if metrics:
        trainer.evaluate()
        found.append({"predicted": trainer.predict(documents(6, 3)).predictions})
        trainer.data_collator = without_labels
        found.append({"predicted": trainer.predict(documents(6, 3)).predictions})
    state = trainer.accelerator.unwrap_model(trainer.model_wrapped).state_dict()
    whole = (x.full_tensor() if isinstance(x, DTensor) else x for x in state.values())
    found.append({"weights": torch.stack([x.float().sum() for x in whole]).numpy()})
    return found


def parallelism_config(cp: int, tp: int = 1) -> Any:
    """As from `parallelism_config_cp_size` in a file of accelerate's, which refuses CPUs."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    ParallelismConfig._validate_accelerator = lambda *_: None
    dp = dist.get_world_size() // (cp * tp)
    return ParallelismConfig(cp_size=cp, dp_shard_size=dp, tp_size=tp)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="pissa")
    return get_peft_model(model, config)


def by_sft(cp: int, name: str, packing: bool) -> list[dict[str, Any]]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="3"))
    special = {"pad_token": "0", "eos_token": "2", "unk_token": "3"}
    logs = Logs()
    more = {
        "gradient_checkpointing": True,
        "bf16": False,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    of_batch = {"per_device_train_batch_size": 4, "prediction_loss_only": True}
    given = arguments_of(cp, **more, **of_batch, packing=packing, padding_free=True)
    if name == "gpt_oss":  # the loss of routers is that of a rank's tokens
        given["router_aux_loss_coef"] = 0.0
    trainer = SFTTrainer(
        model=model_of(name),
        args=SFTConfig(folder_of_all(), **given, max_length=128 if packing else None),
        train_dataset=Dataset.from_list([{"input_ids": x["input_ids"]} for x in documents(64, 1)]),
        eval_dataset=Dataset.from_list([{"input_ids": x["input_ids"]} for x in documents(8, 2)]),
        processing_class=hf.PreTrainedTokenizerFast(tokenizer_object=words, **special),
        callbacks=[logs],
    )
    if cp > 1:
        context_parallel(trainer, cp_size=cp, options=OPTIONS)
    trainer.train()
    return logs.found


def split_by_transformers(model: Any, tp: int) -> Any:
    """The model with its heads on `tp` ranks, and every weight on all."""
    from transformers.distributed import DistributedConfig

    ParallelismConfig._validate_accelerator = lambda *_: None  # of the config that Trainer makes
    folder = folder_of_all()
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    sizes = DistributedConfig(tp_size=tp, fsdp_size=dist.get_world_size() // tp)
    given = {"attn_implementation": model.config._attn_implementation, "dtype": torch.float32}
    return type(model).from_pretrained(folder, distributed_config=sizes, **given)


def split_heads(model: Any, mesh: Any) -> None:
    """Tensor parallelism of a Llama, by PyTorch."""
    column, row = ColwiseParallel(), RowwiseParallel()
    attention = {f"self_attn.{x}_proj": column for x in "qkv"} | {"self_attn.o_proj": row}
    mlp = {"mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**attention, **mlp})


def by_loop(
    cp: int, name: str, *, shards_weights: bool = False, tp: int = 1
) -> list[dict[str, Any]]:
    """accelerate's plain loop, with DDP or with FSDP2's `fully_shard`; two batches a step."""
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        parallelism_config=parallelism_config(cp, tp) if cp > 1 and tp > 1 else None,
    )
    model, mesh = model_of(name), accelerator.torch_device_mesh
    collate = hf.DataCollatorWithFlattening()
    loader = torch.utils.data.DataLoader(documents(48, 1), batch_size=4, collate_fn=collate)
    ranks = None
    if cp > 1:
        ranks = context_parallel(accelerator, model, cp_size=cp, options=OPTIONS)
    loader = accelerator.prepare(loader)
    if accelerator.num_processes > 1 and shards_weights:
        from torch.distributed.fsdp import fully_shard

        over = {} if mesh is None else {"mesh": mesh["dp_shard_cp"]}
        if tp > 1:
            split_heads(model, mesh["tp"])
        for layer in model.model.layers:
            fully_shard(layer, **over)
        fully_shard(model, **over)
    elif accelerator.num_processes > 1:
        model = accelerator.prepare(model)
    optimizer, batches, found = torch.optim.SGD(model.parameters(), 0.3), list(loader), []
    if mesh is not None:
        size = model.model.layers[0].mlp.up_proj.weight.to_local().shape
        assert tuple(size) == (SMALL["intermediate_size"] // (cp * tp), SMALL["hidden_size"])
        model._tp_size = tp  # which transformers notes of models that it splits itself
        model, optimizer = accelerator.prepare(model, optimizer)
    for pair in zip(batches[::2], batches[1::2], strict=True):
        total = torch.zeros(())
        if ranks is None:
            count = sum((x["labels"][:, 1:] != -100).sum().float() for x in pair)
            count = accelerator.reduce(count, "mean")
        else:
            count = ranks.count(*pair)
        for batch in pair:
            more = {"use_cache": False, "num_items_in_batch": count}
            inputs = {**batch, **more} if ranks is None else ranks.shard(batch, count)
            loss = model(**inputs).loss
            accelerator.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": accelerator.reduce(total, "mean").item()})
    return found


DOORS = {"trainer": by_trainer, "sft": by_sft, "loop": by_loop}


def run(group: Any, runs: list[tuple[str, dict[str, Any]]], cp: int = 2) -> list[Any]:
    """The numbers of several runs, on all ranks of `group`, or alone for None."""
    if group is not None:
        torch.set_num_threads(1)
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="1")
        multiprocessing.current_process()._config["daemon"] = False  # so that loaders have workers
    found = []
    for door, given in runs:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        found.append(DOORS[door](1 if group is None else cp, **given))
    return found
