"""Models of text and images with "magi" in both parts: logits and gradients of eager attention."""

import pytest
import torch

hf = pytest.importorskip("transformers")

from magi_compile.integrations import transformers as door  # noqa: E402, F401

IMAGE = 60  # the token
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0, **LAYERS}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 14}


def row(*images):
    """Text around images of so many tokens."""
    tokens = [5, 6]
    for count in images:
        tokens += [61, *[IMAGE] * count, 62, 7, 8, 9]
    return torch.tensor([tokens])


def gemma3():
    kinds = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    tower = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56}
    config = hf.Gemma3Config(
        text_config={**TEXT, **kinds, "head_dim": 16},
        vision_config=tower,
        mm_tokens_per_image=16,
        image_token_id=IMAGE,
    )
    tokens = row(16, 16)
    batch = {"pixel_values": torch.randn(2, 3, 56, 56), "token_type_ids": tokens.eq(IMAGE).long()}
    return hf.Gemma3ForConditionalGeneration, config, tokens, batch


def qwen_vl():
    """Positions of three axes in the text, windows in one of two layers of the tower."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tower = {**TOWER, "depth": 2, "num_heads": 2, "spatial_merge_size": 2, "window_size": 56}
    config = hf.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**tower, "fullatt_block_indexes": [1], "out_hidden_size": 32},
        image_token_id=IMAGE,
        vision_start_token_id=61,
        vision_end_token_id=62,
        video_token_id=63,
    )
    sizes, tokens = torch.tensor([[1, 8, 8], [1, 4, 8]]), row(16, 8)
    patches = torch.randn(int(sizes.prod(1).sum()), 3 * 2 * 14 * 14)
    kinds = {"mm_token_type_ids": tokens.eq(IMAGE).int()}
    return (
        hf.Qwen2_5_VLForConditionalGeneration,
        config,
        tokens,
        {"pixel_values": patches, "image_grid_thw": sizes, **kinds},
    )


@pytest.mark.parametrize("made", [gemma3, qwen_vl])
def test_like_eager(made):
    torch.manual_seed(0)
    kind, config, tokens, batch = made()
    model = kind._from_config(config, attn_implementation="magi")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    found = []
    for implementation in ("magi", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(input_ids=tokens, labels=labels, use_cache=False, **batch)
        out.loss.backward()
        gradients = {n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}
        found.append((out.logits, gradients))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    assert any("vision" in name or "visual" in name for name in found[0][1])
