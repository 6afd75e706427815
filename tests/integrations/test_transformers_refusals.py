"""What "magi" does not do says so, and what to do instead."""

import pytest
import torch

hf = pytest.importorskip("transformers")

from magi_compile.integrations import transformers as door  # noqa: E402
from tests.integrations.models import (  # noqa: E402
    SEQLEN,
    cu_seq_lens,
    make_model,
    tokens,
)


def attend(**arguments):
    layer = make_model("llama").model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 30, 16) for heads in (4, 2, 2))
    return door.magi_attention(layer, q, k, v, **{"attention_mask": None, **arguments})


def test_output_attentions():
    with pytest.raises(NotImplementedError, match=r"no `output_attentions`.*'eager'"):
        make_model("llama")(input_ids=tokens(), output_attentions=True)


@pytest.mark.parametrize(
    "name", ["head_mask", "layer_head_mask", "indices", "block_indices", "sinks"]
)
def test_what_changes_scores(name):
    with pytest.raises(NotImplementedError, match=f"has no `{name}`, which is .*; use "):
        attend(is_causal=True, **{name: torch.ones(4)})


def test_dropout():
    with pytest.raises(
        ValueError, match=r"no dropout, got 0.5: set the dropout.*attention_dropout"
    ):
        make_model("llama", attention_dropout=0.5).train()(input_ids=tokens())
    make_model("llama", attention_dropout=0.5).eval()(input_ids=tokens())


def test_no_mask_in_a_causal_layer():
    with pytest.raises(ValueError, match=r"must be a mask in the causal LlamaAttention, got None"):
        attend()


def test_lists_with_a_dense_mask():
    mask = torch.ones(1, 1, SEQLEN, SEQLEN, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"cu_seq_lens_q.*shape \[1, 1, 192, 192\]"):
        make_model("llama")(input_ids=tokens(batch=1), attention_mask=mask, **cu_seq_lens())


def test_steps_with_a_soft_cap_without_an_eager_attention():
    step = {"attention_mask": torch.ones(1, 1, 30, 30, dtype=torch.bool), "softcap": 3.0}
    q, k, v = (torch.randn(1, 2, 30, 16) for _ in range(3))
    with pytest.raises(
        NotImplementedError, match="linear has none; use attn_implementation='eager'"
    ):
        door.magi_attention(torch.nn.Linear(1, 1), q, k, v, **step)


def test_a_mask_without_a_function():
    with pytest.raises(TypeError, match="`mask_function` must be a function of b, h, q and kv"):
        door.magi_mask(1, 30, 30)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_other_compilers(fullgraph):
    forward = torch.compile(make_model("llama"), backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError, match=r"backend='magi'\), or\s+magi_compile.enable\(\)"):
        forward(input_ids=tokens())


def test_unknown_arguments_are_named_once(warnings_of_ours):
    model = make_model("llama")
    for _ in range(2):
        model(input_ids=tokens(), invented=torch.ones(3))
    assert warnings_of_ours() == [
        "`attn_implementation='magi'` does not know the argument `invented` and ignores it"
    ]


def test_register_flex_attention_mask_takes_a_bool():
    with pytest.raises(TypeError, match="`enabled` must be True or False, got 'yes'"):
        door.register_flex_attention_mask("yes")
