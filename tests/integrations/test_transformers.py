"""`attn_implementation="magi"` in eager code: logits, losses and gradients of eager attention, documents kept apart."""

import pytest
import torch

hf = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from magi_compile.integrations import packed_documents  # noqa: E402
from magi_compile.integrations import transformers as door  # noqa: E402
from magi_compile.masks import create_block_mask, pack_shared_prefixes  # noqa: E402
from tests.integrations.models import (  # noqa: E402
    DECODERS,
    INPUTS,
    LAYERS,
    LENGTHS,
    MODELS,
    SEQLEN,
    assert_same,
    cu_seq_lens,
    inputs_of_eager,
    make_model,
    padded,
    positions,
    step,
    tokens,
    uncounted,
)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", MODELS)
def test_like_eager(name, kind, forwards, warnings_of_ours):
    ours = step(make_model(name), INPUTS[kind]())
    assert len(forwards) == LAYERS
    assert not warnings_of_ours()
    model = make_model(name, "eager")
    assert_same(ours, step(model, inputs_of_eager(model, name, INPUTS[kind]())))


@pytest.mark.parametrize("kind", ["hole", "zeros", "gap", "steps", "repeats", "branches"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_positions_that_are_no_borders(name, kind):
    """Only positions that go back to 0 are; eager, sdpa and flex_attention agree here."""
    ours = step(make_model(name), uncounted(kind))
    assert_same(ours, step(make_model(name, "eager"), uncounted(kind)))


def test_documents_of_positions():
    """Gaps do not hide that positions go back to 0, and documents may have one token."""

    def read(*rows):
        place = torch.tensor(rows)
        found = packed_documents.documents_of_positions(
            (place, place), (len(rows), len(rows[0]), 0)
        )
        return None if found is None else found[0].tolist()

    assert read([0, 1, 5, 0, 1, 9]) == [[0, 0, 0, 1, 1, 1]]
    assert read([0, 0, 1, 0, 0, 1], [0, 1, 2, 3, 3, 4]) == [[0, 1, 1, 2, 3, 3], [0] * 6]
    assert read([7, 8, 9, 0, 1, 2]) == [[0, 0, 0, 1, 1, 1]]
    for no_borders in ([0, 0, 1, 1, 2, 2], [-1, -1, 0, 1, 2, 3], [3, 4, 5, 3, 4, 5]):
        assert read(no_borders) is None


def test_a_mask_of_the_users_in_evaluation_and_training():
    """What is kept with the mask is not of the mode of its first call."""
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, 1, None, SEQLEN, SEQLEN, device="cpu")
    lists = cu_seq_lens()
    pair = (lists["cu_seq_lens_q"], lists["cu_seq_lens_k"])
    with torch.inference_mode():
        sizes = (1, SEQLEN, SEQLEN)
        within = packed_documents.within_documents(
            mask, pair, packed_documents.documents_of_lists, sizes
        )
    captured = [cell.cell_contents for cell in within.mask_mod.__closure__]
    made = [x for x in (*captured, within.kv_indices) if isinstance(x, torch.Tensor)]
    assert len(made) == 3
    assert not any(x.is_inference() for x in made)


PACKS = {
    "positions": lambda: {"position_ids": positions()},
    "positions_and_lists": lambda: {"position_ids": positions(), **cu_seq_lens()},
    "with_a_cache": lambda: {"position_ids": positions(), "use_cache": True},
    "with_a_mask_of_ones": lambda: {
        "position_ids": positions(),
        "attention_mask": torch.ones(1, SEQLEN, dtype=torch.long),
    },
}


def each_alone(model, batch, **rest):
    """Logits of the documents of a pack, each of which the model sees alone."""
    parts = batch.split(LENGTHS, 1)
    alone = [model(input_ids=x, position_ids=positions((x.shape[1],)), **rest) for x in parts]
    return torch.cat([output.logits for output in alone], 1)


@pytest.mark.parametrize(
    ("name", "pack"),
    # transformers counts chunks over the whole pack where it makes a mask without documents.
    [(n, p) for n in DECODERS for p in PACKS if not (n == "llama4" and "with" in p)],
)
def test_documents_do_not_see_each_other(name, pack):
    """Not even where eager attention lets them, which is where transformers makes a mask without them."""
    model, batch = make_model(name), tokens(batch=1)
    with torch.no_grad():
        logits = model(input_ids=batch, **PACKS[pack]()).logits
        torch.testing.assert_close(logits, each_alone(model, batch), atol=1e-4, rtol=1e-4)


def test_a_mask_that_intervals_can_not_express():
    generator = torch.Generator().manual_seed(0)
    table = torch.rand(SEQLEN, SEQLEN, generator=generator) < 0.5
    mask = door.magi_mask(2, SEQLEN, SEQLEN, mask_function=lambda b, h, q, kv: table[q, kv])
    with torch.no_grad():
        ours = make_model("llama")(input_ids=tokens(), attention_mask=mask).logits
        added = torch.where(table, 0.0, -torch.inf).expand(2, 1, SEQLEN, SEQLEN)
        theirs = make_model("llama", "eager")(input_ids=tokens(), attention_mask=added).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_documents_of_an_encoder():
    """An encoder's masks never have documents in transformers; lists bring them."""
    model, batch = make_model("modernbert"), tokens(batch=1)
    with torch.no_grad():
        logits = model(input_ids=batch, position_ids=positions(), **cu_seq_lens()).logits
        torch.testing.assert_close(logits, each_alone(model, batch), atol=1e-4, rtol=1e-4)


def test_documents_are_added_only_where_a_mask_lacks_them():
    """Of functions that hold one another, themselves included."""
    packs = positions() * 0

    def around(inner):
        def outer(b, h, q, kv):
            return outer is not None and inner(b, h, q, kv)

        return outer

    with_documents = masking_utils.packed_sequence_mask_function(packs)
    causal = masking_utils.causal_mask_function
    assert packed_documents.has_documents(around(masking_utils.and_masks(causal, with_documents)))
    assert not packed_documents.has_documents(around(masking_utils.and_masks(causal, causal)))


def test_documents_of_a_batch_are_counted_over_its_entries():
    model, batch = make_model("llama"), tokens(batch=2)
    lists = cu_seq_lens((*LENGTHS, 92, 100))
    with torch.no_grad():
        place = torch.cat([positions(), positions((92, 100))])
        both = model(input_ids=batch, position_ids=place, **lists).logits
        first = model(input_ids=batch[:1], position_ids=place[:1]).logits
        second = model(input_ids=batch[1:], position_ids=place[1:]).logits
    torch.testing.assert_close(both, torch.cat([first, second]), atol=1e-4, rtol=1e-4)


def test_lists_that_change_are_read_again():
    """The same tensor with other documents, and the same mask."""
    model, batch, lists = make_model("gpt_oss"), tokens(batch=1), cu_seq_lens()
    others = cu_seq_lens((52, 100, 40))
    with torch.no_grad():
        model(input_ids=batch, **lists)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            lists[name].copy_(others[name])
        again = model(input_ids=batch, **lists).logits
        torch.testing.assert_close(again, model(input_ids=batch, **others).logits)


def cross_attention():
    config = hf.BartConfig(
        vocab_size=128,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=256,
        init_std=0.2,
    )
    inputs = {"attention_mask": padded("right"), "decoder_input_ids": tokens(seqlen=70)}
    return hf.BartForConditionalGeneration, config, {"input_ids": tokens(), **inputs}, 3


def encoder():
    config = hf.BertConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.2,
    )
    inputs = {"input_ids": tokens(), "attention_mask": padded("left")}
    return hf.BertForMaskedLM, config, inputs, 1


def image_encoder():
    config = hf.ViTConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=64,
        patch_size=8,
        initializer_range=0.2,
    )
    return hf.ViTForImageClassification, config, {"pixel_values": torch.randn(2, 3, 64, 64)}, 1


def narrow_values():
    """Multi-head latent attention: heads of v are narrower than those of q."""
    config = hf.DeepseekV3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        initializer_range=0.2,
    )
    inputs = {"input_ids": tokens(), "attention_mask": padded("right")}
    return hf.DeepseekV3ForCausalLM, config, inputs, 1


@pytest.mark.parametrize("case", [cross_attention, encoder, image_encoder, narrow_values])
def test_other_architectures(case, forwards):
    torch.manual_seed(0)
    kind, config, inputs, num_attentions = case()
    model = kind._from_config(config, attn_implementation="magi").eval()
    ours = model(**inputs).logits
    assert len(forwards) == num_attentions
    model.set_attn_implementation("eager")
    is_token = inputs["attention_mask"].bool() if case is encoder else slice(None)
    torch.testing.assert_close(
        ours[is_token], model(**inputs).logits[is_token], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant, forwards):
    model = make_model("gemma3").train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    ours = step(model, INPUTS["packed"]())
    assert len(forwards) == 2 * LAYERS
    assert_same(ours, step(make_model("gemma3", "eager").train(), INPUTS["packed"]()))


def test_bfloat16():
    """At most twice the error of eager attention in bfloat16."""
    inputs = INPUTS["packed"]()
    with torch.no_grad():
        exact = make_model("gemma3", "eager")(input_ids=tokens(), **inputs).logits
        ours, theirs = (
            make_model("gemma3", name).bfloat16()(input_ids=tokens(), **inputs).logits - exact
            for name in ("magi", "eager")
        )
    assert float(ours.square().mean()) < 2 * float(theirs.square().mean())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_autocast(name, forwards):
    """Rotary embeddings, and norms of heads, leave q and k in fp32: at most twice the error of sdpa."""
    exact = step(make_model(name, "sdpa"), INPUTS["packed"]())
    errors = []
    for implementation in ("magi", "sdpa"):
        with torch.autocast("cpu", torch.bfloat16):
            found = step(make_model(name, implementation), INPUTS["packed"]())
        wanted = exact.gradients.items()
        errors.append(sum((found.gradients[key] - x).square().sum() for key, x in wanted))
    assert len(forwards) == LAYERS
    assert errors[0] < 4 * errors[1]


def test_a_block_mask_of_the_users(forwards):
    """transformers hands it to the layers as it is."""

    def prefix(b, h, q, kv):
        return (q >= kv) | (kv < 30)

    model = make_model("llama")
    mask = create_block_mask(prefix, 2, None, SEQLEN, SEQLEN, device="cpu")
    with torch.no_grad():
        ours = model(input_ids=tokens(), attention_mask=mask).logits
        rows = torch.arange(SEQLEN)
        dense = prefix(0, 0, rows[:, None], rows).expand(2, 1, -1, -1)
        model.set_attn_implementation("sdpa")
        theirs = model(input_ids=tokens(), attention_mask=dense).logits
    assert len(forwards) == LAYERS
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_dense_mask_of_the_users_runs_on_sdpa(forwards, warnings_of_ours):
    model = make_model("llama")
    dense = torch.ones(2, 1, SEQLEN, SEQLEN, dtype=torch.bool).tril()
    with torch.no_grad():
        ours = model(input_ids=tokens(), attention_mask=dense).logits
        assert not forwards
        (warning,) = warnings_of_ours()
        assert "dense `attention_mask`, whose attention runs on scaled_dot_product" in warning
        torch.testing.assert_close(ours, model(input_ids=tokens()).logits, atol=1e-4, rtol=1e-4)


def test_a_soft_cap_with_a_dense_mask_runs_on_the_models_own():
    model = make_model("gemma2")
    dense = torch.ones(2, 1, SEQLEN, SEQLEN, dtype=torch.bool).tril()
    masks = dict.fromkeys(("full_attention", "sliding_attention"), dense)
    with torch.no_grad():
        ours = model(input_ids=tokens(), attention_mask=masks).logits
        model.set_attn_implementation("eager")
        numbers = torch.where(dense, 0.0, torch.finfo(torch.float32).min)
        masks = dict.fromkeys(masks, numbers)
        theirs = model(input_ids=tokens(), attention_mask=masks).logits
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("is_causal", [True, False])
def test_what_no_mask_stands_for(is_causal):
    """A layer by itself, whose caller says so."""
    layer = make_model("llama").model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 30, 16) for heads in (4, 2, 2))
    out, weights = door.magi_attention(layer, q, k, v, None, is_causal=is_causal)
    assert weights is None
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=True
    )
    torch.testing.assert_close(out, wanted.transpose(1, 2))


SMALL_GPT = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 2}
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "eos_token_id": 1}
SMALL_OPT = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": LAYERS}
LEARNED_POSITIONS = {
    "gpt2": lambda: (hf.GPT2LMHeadModel, hf.GPT2Config(**SMALL_GPT, **WITHOUT_DROPOUT)),
    "gpt_bigcode": lambda: (
        hf.GPTBigCodeForCausalLM,
        hf.GPTBigCodeConfig(**SMALL_GPT, **WITHOUT_DROPOUT),
    ),
    "opt": lambda: (
        hf.OPTForCausalLM,
        hf.OPTConfig(
            **SMALL_OPT,
            num_attention_heads=2,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
            dropout=0.0,
        ),
    ),
}


@pytest.mark.parametrize("name", LEARNED_POSITIONS)
def test_a_block_mask_of_models_that_read_the_mask(name):
    """GPT-2 asks it for its dimensions, and OPT makes positions of it where it is given none."""
    kind, config = LEARNED_POSITIONS[name]()
    model = kind._from_config(config, attn_implementation="magi").eval()
    packed = pack_shared_prefixes([[5, 6, 7, 8]], [[[9, 10], [11, 12, 13], [14]]])
    inputs = {"position_ids": packed.position_ids, "attention_mask": packed.block_mask}
    logits = model(packed.input_ids, **inputs, use_cache=False).logits
    model.set_attn_implementation("eager")
    for rows, ours in zip(packed.rows, packed.unpack(logits), strict=True):
        wanted = model(packed.input_ids[:, rows], use_cache=False).logits[0]
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LEARNED_POSITIONS)
def test_tokens_of_models_that_read_the_mask(name):
    """With a static cache they are given a BlockMask."""
    torch.manual_seed(0)
    kind, config = LEARNED_POSITIONS[name]()
    model = kind._from_config(config, attn_implementation="magi").eval()
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    arguments = {**greedy, "cache_implementation": "static", "disable_compile": True}
    prompt = torch.randint(3, 60, (2, 20))
    ours = model.generate(prompt, **arguments)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(prompt, **arguments))
