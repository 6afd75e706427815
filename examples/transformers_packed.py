"""Trains a small random Llama of Hugging Face's transformers on packed documents, with and without torch.compile.

pip install ".[transformers]" && python examples/transformers_packed.py
"""

import logging

import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import magi_compile.integrations.transformers  # registers attn_implementation="magi"

WORDS, STEPS, TOKENS = 64, 8, 1024


def make_model(device):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, use_cache=False, pad_token_id=0, **sizes, **heads)
    return LlamaForCausalLM._from_config(config, attn_implementation="magi").to(device)


def packs(device):
    """In each step other documents, together of the same length; each counts up from a word of its own."""
    collate = DataCollatorWithFlattening()  # input_ids, labels and position_ids, all [1, TOKENS]
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        cuts = torch.randperm(TOKENS - 1, generator=generator)[:9].sort()[0] + 1
        lengths = cuts.diff(prepend=torch.tensor([0]), append=torch.tensor([TOKENS]))
        words = torch.randint(0, WORDS, (len(lengths),), generator=generator)
        documents = [
            {"input_ids": ((word + torch.arange(length)) % WORDS).tolist()}
            for word, length in zip(words, lengths, strict=True)
        ]
        yield {name: tensor.to(device) for name, tensor in collate(documents).items()}


def train(device, compiled):
    model = make_model(device)
    step = torch.compile(model, backend="magi", fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in packs(device):
        loss = step(**batch).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    eager = train(device, compiled=False)
    print(f"eager:    loss {eager:.4f} after {STEPS} steps of {TOKENS} tokens")
    print(f"compiled: loss {train(device, compiled=True):.4f}, {magi_compile.lowering_report()}")
