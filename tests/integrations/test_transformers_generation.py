"""Generation with `attn_implementation="magi"`: prompts run on our kernel, steps on sdpa,
and tokens are those of eager."""

import pytest
import torch

hf = pytest.importorskip("transformers")

from magi_compile.integrations import transformers as door  # noqa: E402
from tests.integrations.models import DECODERS, LAYERS, make_model, tokens  # noqa: E402

PROMPT = 60
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def left_padded_prompt():
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :23] = 0
    return mask


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_tokens_of_eager(name, cache, forwards):
    """Prompts go beyond windows and chunks, and one is padded."""
    model, prompt = make_model(name, use_cache=True), tokens(2, PROMPT)
    arguments = {**GREEDY, "attention_mask": left_padded_prompt(), "disable_compile": True}
    arguments["cache_implementation"] = cache
    ours = model.generate(prompt, **arguments)
    assert len(forwards) == LAYERS  # of the prompt
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(prompt, **arguments))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_steps_of_several_rows(name, forwards):
    """Tokens that are looked up in the prompt and checked together."""
    model, prompt = make_model(name, use_cache=True), tokens(1, PROMPT)
    ours = model.generate(prompt, prompt_lookup_num_tokens=3, **GREEDY)
    assert len(forwards) == LAYERS
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(prompt, prompt_lookup_num_tokens=3, **GREEDY))


def test_prompts_in_parts(forwards):
    """The second part is a mask of more keys than rows."""
    model, prompt = make_model("mistral", use_cache=True), tokens(2, PROMPT)
    with torch.no_grad():
        cache = hf.DynamicCache(config=model.config)
        parts = [
            model(input_ids=part, past_key_values=cache).logits for part in prompt.split(30, 1)
        ]
        assert len(forwards) == 2 * LAYERS
        whole = model(input_ids=prompt).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_compiled_step(name):
    """As transformers compiles steps with a static cache: with Inductor and nothing of ours, masks made outside."""
    model, prompt = make_model(name, use_cache=True), tokens(2, PROMPT)
    arguments = {**GREEDY, "cache_implementation": "static", "disable_compile": True}
    wanted = model.generate(prompt, **arguments)
    compiled, calls = torch.compile(model.forward, backend="aot_eager", fullgraph=True), []

    def compiled_step(**inputs):
        calls.append(inputs)
        return compiled(**inputs)

    model.get_compiled_call = lambda config: compiled_step
    model._valid_auto_compile_criteria = lambda *args, **kwargs: True
    assert torch.equal(model.generate(prompt, **{**arguments, "disable_compile": False}), wanted)
    assert calls


def test_a_step_is_that_of_sdpa():
    """A row that sees every key needs no mask, so that the step is the same call."""
    sizes = {"batch_size": 2, "q_length": 1, "kv_length": 50, "q_offset": 49}
    arguments = {**sizes, "mask_function": door._causal, "allow_is_causal_skip": True}
    assert door.magi_mask(**arguments) is None
    padding = torch.ones(2, 50, dtype=torch.bool)
    padding[1, :10] = False
    mask = door.magi_mask(**arguments, attention_mask=padding)
    assert torch.equal(mask.expand(2, 1, 1, 50)[:, 0, 0], padding)


def test_encoder_and_decoder(forwards):
    """Cross attention of steps runs on sdpa as well."""
    sizes = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "init_std": 0.2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    ends = {"decoder_start_token_id": 1, "forced_eos_token_id": None}
    config = hf.BartConfig(
        vocab_size=128, encoder_ffn_dim=64, decoder_ffn_dim=64, **sizes, **heads, **ends
    )
    torch.manual_seed(0)
    model = hf.BartForConditionalGeneration._from_config(config, attn_implementation="magi").eval()
    arguments = {**GREEDY, "attention_mask": left_padded_prompt()}
    ours = model.generate(tokens(2, PROMPT), **arguments)
    assert len(forwards) == 1
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(tokens(2, PROMPT), **arguments))
