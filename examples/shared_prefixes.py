"""One step of a policy on prompts with many rollouts: each prompt repeated for every rollout, and each prompt once.

Prints tokens, seconds and the largest difference of both, on a small random Llama of Hugging Face's transformers. On a
CPU the seconds are the processor's, on one thread: what else it works on does not count.

pip install ".[transformers]" && python examples/shared_prefixes.py --rollouts 16 --prompt 384 --rollout 128
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import magi_compile.integrations.transformers  # noqa: F401, registers attn_implementation="magi"
from magi_compile.masks import pack_shared_prefixes

WORDS = 512


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=16, help="of each prompt")
    parser.add_argument("--prompt", type=int, default=384, help="tokens of a prompt")
    parser.add_argument("--rollout", type=int, default=128, help="tokens of a rollout")
    parser.add_argument("--steps", type=int, default=3, help="of which the fastest is shown")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def make_model(device):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, use_cache=False, pad_token_id=0, **sizes, **heads)
    return LlamaForCausalLM._from_config(config, attn_implementation="magi").to(device)


def log_probs(logits, tokens):
    """That of each token but the first, by the row in front of it."""
    rows = logits[..., :-1, :].float().log_softmax(-1)
    return rows.gather(-1, tokens[..., 1:, None])[..., 0]


def repeated(model, sequences):
    tokens = torch.stack(sequences)
    return log_probs(model(tokens).logits, tokens)


def once(model, packed):
    logits = model(
        packed.input_ids, position_ids=packed.position_ids, attention_mask=packed.block_mask
    ).logits
    rows = packed.unpack(logits), packed.unpack(packed.input_ids)
    return torch.stack([log_probs(*one) for one in zip(*rows, strict=True)])


def step(function, advantages, first, model, *inputs):
    """The log-probs of rollouts, the gradients of all weights, and the seconds."""
    clock = time.process_time if advantages.device.type == "cpu" else time.perf_counter
    model.zero_grad()
    begin = clock()
    found = function(model, *inputs)[:, first:]
    (found * advantages[:, None]).mean().neg().backward()
    gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    found = found.detach().cpu()  # waits for a GPU
    return found, gradients, clock() - begin


def main():
    args = arguments()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def words(count):
        return torch.randint(0, WORDS, (count,), generator=generator)

    prompts = [words(args.prompt) for _ in range(args.prompts)]
    rollouts = [[words(args.rollout) for _ in range(args.rollouts)] for _ in prompts]
    sequences = [
        torch.cat([prompt, rollout]).to(args.device)
        for prompt, own in zip(prompts, rollouts, strict=True)
        for rollout in own
    ]
    advantages = torch.randn(len(sequences), generator=generator).to(args.device)
    model = make_model(args.device)
    packed = pack_shared_prefixes(prompts, rollouts, device=args.device)
    first = args.prompt - 1  # of the log-probs: of the first token of a rollout
    results = []
    for name, function, inputs in (
        ("repeated", repeated, sequences),
        ("once", once, packed),
    ):
        runs = [step(function, advantages, first, model, inputs) for _ in range(args.steps)]
        found, gradients, seconds = min(runs, key=lambda run: run[-1])
        tokens = packed.num_repeated_tokens if name == "repeated" else packed.input_ids.shape[1]
        print(f"prompts {name}: {tokens} tokens, {seconds:.3f} s a step")
        results.append((found, gradients, seconds, tokens))
    (found, gradients, slow, many), (other, same, fast, few) = results
    print(f"{many / few:.2f} times fewer tokens, {slow / fast:.2f} times less time")
    print(f"log-probs differ by at most {(found - other).abs().max().item():.1e},", end=" ")
    print(
        f"gradients by {(gradients - same).abs().max() / gradients.abs().max():.1e} of the largest"
    )


if __name__ == "__main__":
    main()
