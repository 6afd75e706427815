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


def of_lists(q=None, k=None, batch=2, rows=6, keys=6):
    layer = make_model("llama").model.layers[0].self_attn
    q_, k_, v_ = (torch.randn(batch, h, n, 16) for h, n in ((4, rows), (2, keys), (2, keys)))
    given = {name: x for name, x in (("cu_seq_lens_q", q), ("cu_seq_lens_k", k)) if x is not None}
    return door.magi_attention(layer, q_, k_, v_, None, is_causal=False, **given)[0]


LISTS = [
    (lambda: of_lists([0, 6, 12]), r"`cu_seq_lens_q` must be a tensor, got \[0, 6, 12\]"),
    (lambda: of_lists("x"), "`cu_seq_lens_q` must be a tensor, got 'x'"),
    (lambda: of_lists(3), "`cu_seq_lens_q` must be a tensor, got 3"),
    (lambda: of_lists(t(0, 6, 12), (0, 6, 12)), r"`cu_seq_lens_k` must be a tensor, got \(0, 6"),
    (lambda: of_lists(torch.tensor(3)), r"`cu_seq_lens_q` must have shape .*, got \[\]"),
    (lambda: of_lists(t(0, 6, 12)[None]), r"`cu_seq_lens_q` must have shape .*, got \[1, 3\]"),
    (lambda: of_lists(t()), r"`cu_seq_lens_q` must have shape .*, got \[0\]"),
    (lambda: of_lists(t(0, 6, 12).float()), "`cu_seq_lens_q` must hold int32 or int64 .*float32"),
    (lambda: of_lists(t(0, 6, 12), t(0, 12).bool()), "`cu_seq_lens_k` must hold int32 .* got .*bool"),
    (lambda: of_lists(None, t(0, 6, 12)), "`cu_seq_lens_q` must be given where `cu_seq_lens_k` is"),
    (lambda: of_lists(t(0, 6, 12), keys=7), "`cu_seq_lens_k` must be given .* differ, 6 and 7"),
    (lambda: of_lists(t(0, 6, 12), t(0, 12)), "`cu_seq_lens_k` must have the length of .*, 3, got 2"),
    (lambda: of_lists(t(1, 6, 12)), "`cu_seq_lens_q` must start at 0, got 1"),
    (lambda: of_lists(t(-1, 6, 12)), "`cu_seq_lens_q` must start at 0, got -1"),
    (lambda: of_lists(t(0, 6, 4, 12)), r"`cu_seq_lens_q` must never decrease, got \[6, 4\] at 1"),
    (lambda: of_lists(t(0, 6, 13)), "`cu_seq_lens_q` must end within the 12 tokens .*, got 13"),
    (lambda: of_lists(t(0, 6, 12), t(0, 6, 15)), "`cu_seq_lens_k` must end within the 12 .*, got 15"),
    (lambda: of_lists(t(0, 5, 12)), r"`cu_seq_lens_q` must hold .* of 6, got \[0, 5, 12\] without 6"),
    (lambda: of_lists(t(0, 2, 6, 12), t(0, 6, 8, 12)), "`cu_seq_lens_k` must .* document 1 in entries 1 and 0"),
]  # fmt: skip


def t(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(("call", "message"), LISTS)
def test_lists_that_are_no_documents(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_lists_of_other_forms():
    """Padding behind the last number, documents without rows or without keys, and one row."""
    whole = of_lists(t(0, 6, 12)).shape
    for q, k in [
        (t(0, 4), None),
        (t(0, 4, 6, 8), None),
        (t(0, 6, 6, 12), t(0, 3, 6, 12)),
        (t(0), None),
    ]:
        assert of_lists(q.long(), k).shape == whole
    torch.manual_seed(0)
    one = of_lists(t(0, 1, 2), t(0, 7, 14), rows=1, keys=7)
    torch.manual_seed(0)
    assert torch.equal(one, of_lists(rows=1, keys=7)) or torch.allclose(
        one, of_lists(rows=1, keys=7)
    )


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
