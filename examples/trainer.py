"""Trains a small Llama by Hugging Face's Trainer on packed documents whose sequence is spread over all ranks; its
losses are those of one process.

torchrun --nproc-per-node 2 examples/trainer.py

Needs `pip install ".[trainer]"`. Without a GPU it runs over gloo. Two lines differ from a program for one process.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from magi_compile.integrations.trainer import context_parallel  # the first line

WORDS, STEPS, DOCUMENTS = 64, 8, 4  # documents of a batch


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=2))


def documents() -> list[dict[str, list[int]]]:
    """Documents of 100 to 600 words, each counting up from a word of its own."""
    order = torch.Generator().manual_seed(0)
    made = []
    for length in torch.randint(100, 600, (STEPS * DOCUMENTS,), generator=order).tolist():
        first = int(torch.randint(WORDS, (), generator=order))
        words = [(first + 3 * i) % WORDS for i in range(length)]
        made.append({"input_ids": words, "labels": words})
    return made


def losses_over_ranks(data: list[dict[str, list[int]]]) -> list[float]:
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=DOCUMENTS,
        max_steps=STEPS,
        logging_steps=1,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        use_cpu=not torch.cuda.is_available(),
        train_sampling_strategy="sequential",
    )
    collator = DataCollatorWithFlattening()  # packs: positions begin anew in each document
    trainer = Trainer(make_model(), arguments, train_dataset=data, data_collator=collator)
    context_parallel(trainer, cp_size=dist.get_world_size())  # the second line
    trainer.train()
    return [x["loss"] for x in trainer.state.log_history if "loss" in x]


def losses_of_one_process(data: list[dict[str, list[int]]]) -> list[float]:
    """The same by hand: PyTorch's attention in each document."""
    model, found = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for begin in range(0, len(data), DOCUMENTS):
        total, count = torch.zeros(()), 0
        for document in data[begin : begin + DOCUMENTS]:
            words = torch.tensor([document["input_ids"]])
            count += words.shape[1] - 1
            total = total + model(input_ids=words, labels=words).loss * (words.shape[1] - 1)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as the Trainer does by default
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / count).item())
    return found


if __name__ == "__main__":
    data = documents()
    ours = losses_over_ranks(data)
    if dist.get_rank() == 0:
        for loss, one in zip(ours, losses_of_one_process(data), strict=True):
            print(f"loss {loss:.6f}, on one process {one:.6f}")
    dist.destroy_process_group()
