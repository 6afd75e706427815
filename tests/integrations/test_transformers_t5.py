"""T5 with `attn_implementation="magi"`: a learned bias of each head and distance, an encoder, and attention to it."""

import pytest
import torch

hf = pytest.importorskip("transformers")

from magi_compile.integrations.transformers import magi_attention  # noqa: E402
from magi_compile.kernels.cpu import CpuKernel  # noqa: E402
from magi_compile.lowering.backend import make_backend  # noqa: E402
from magi_compile.lowering.report import REPORT  # noqa: E402

CONFIG = {
    "vocab_size": 96,
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 24,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def model_of(implementation):
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration._from_config(
        hf.T5Config(**CONFIG), attn_implementation=implementation
    )
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(parameter)
    return model.eval()


def inputs(is_padded=False):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(2, 96, (2, 70), generator=generator)
    answer = torch.randint(2, 96, (2, 33), generator=generator)
    mask = torch.ones_like(words)
    if is_padded:
        mask[1, 50:] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": answer, "use_cache": False}


def step(model, forward, given):
    output = forward(**given)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def check(forward_of, given):
    ours, eager = model_of("magi"), model_of("eager")
    logits, gradients = step(ours, forward_of(ours), given)
    wanted, wanted_gradients = step(eager, eager, given)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    biases = [name for name in gradients if "relative_attention_bias" in name]
    assert len(biases) == 2  # of the encoder and the decoder
    assert all(float(gradients[name].abs().max()) > 0 for name in biases)
    for name, gradient in wanted_gradients.items():
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, atol=atol, rtol=1e-3, msg=name)


# Each layer of the decoder also attends to the encoder.
ATTENTIONS = 3 * CONFIG["num_layers"]


@pytest.mark.parametrize("is_padded", [False, True], ids=["plain", "padded"])
def test_like_eager(is_padded, monkeypatch):
    runs, forward = [], CpuKernel.forward
    monkeypatch.setattr(
        CpuKernel, "forward", lambda *args, **rest: runs.append(1) or forward(*args, **rest)
    )
    check(lambda model: model, inputs(is_padded))
    assert len(runs) == ATTENTIONS


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(inner):
    backend = make_backend(inner)
    check(lambda model: torch.compile(model, backend=backend, fullgraph=True), inputs(True))
    assert (len(REPORT.lowered), len(REPORT.refused)) == (ATTENTIONS, 0)


def test_generation():
    given = {k: v for k, v in inputs(True).items() if k in ("input_ids", "attention_mask")}
    made = [
        model_of(name).generate(**given, max_new_tokens=12, do_sample=False, min_new_tokens=12)
        for name in ("magi", "eager")
    ]
    assert torch.equal(*made)


def test_a_bias_of_each_batch_entry_and_a_wrong_one():
    module, (q, k, v) = torch.nn.Module(), torch.randn(3, 2, 4, 40, 16).unbind(0)
    module.is_causal = False
    bias = torch.randn(2, 4, 40, 40, requires_grad=True)
    out, _ = magi_attention(module, q, k, v, None, position_bias=bias, is_causal=False)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    torch.testing.assert_close(out.transpose(1, 2), wanted, atol=1e-5, rtol=1e-5)
    for wrong in (bias.expand(3, 2, 4, 40, 40)[:, 0], bias[:, :1], bias[..., :39], bias[0]):
        with pytest.raises(ValueError, match=r"`position_bias` must.*\[2, 4, 40, 40\].*got \["):
            magi_attention(module, q, k, v, None, position_bias=wrong, is_causal=False)


def of_step():
    """A step of 2 batch entries, 3 rows and 9 keys; the second entry's first row sees nothing."""
    torch.manual_seed(0)
    module = gemma_like()
    q = torch.randn(2, 4, 3, 16)
    k, v = torch.randn(2, 2, 4, 9, 16)
    mask = torch.ones(2, 1, 3, 9, dtype=torch.bool)
    mask[:, :, :, 7:] = False
    mask[1, 0, 0] = False
    return module, q, k, v, mask, torch.randn(2, 4, 3, 9)


def gemma_like():
    """A module in the file of a model that has soft-caps in its eager attention."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

    module = Gemma2Attention.__new__(Gemma2Attention)
    torch.nn.Module.__init__(module)
    module.is_causal, module.num_key_value_groups = True, 1
    return module.eval()


def wanted_of(q, k, v, mask, bias, softcap=None):
    scores = q.float() @ k.float().mT / 4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias.float()).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ v.float()).transpose(1, 2)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entries", [1, 2])
def test_a_bias_in_a_step(softcap, dtype, entries):
    module, q, k, v, mask, bias = of_step()
    bias = bias[:entries].to(dtype)
    out, _ = magi_attention(module, q, k, v, mask, 0.25, position_bias=bias, softcap=softcap)
    assert float(out[1, 0].abs().max()) == 0
    torch.testing.assert_close(out, wanted_of(q, k, v, mask, bias, softcap), atol=1e-5, rtol=1e-5)


def test_a_bias_of_more_bits_than_the_query_in_a_step():
    module, q, k, v, mask, bias = of_step()
    low = [x.bfloat16() for x in (q, k, v)]
    out, _ = magi_attention(module, *low, mask, 0.25, position_bias=bias)
    wanted = wanted_of(*low, mask, bias)
    torch.testing.assert_close(out.float(), wanted, atol=0.03, rtol=0.03)
    added = torch.zeros(2, 1, 3, 9).masked_fill(~mask, -1e30)
    out, _ = magi_attention(module, *low, added, 0.25, position_bias=bias)
    seen = mask.any(-1)[:, 0]
    torch.testing.assert_close(out.float()[seen], wanted[seen], atol=0.03, rtol=0.03)


def test_a_row_that_sees_nothing_in_a_step_with_softcap():
    module, q, k, v, mask, bias = of_step()
    out, _ = magi_attention(module, q, k, v, mask, 0.25, softcap=1.5)
    wanted = wanted_of(q, k, v, mask, torch.zeros_like(bias), 1.5)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_wrong_bias_in_a_step(has_mask):
    module, q, k, v, mask, bias = of_step()
    q, mask, bias = q[:, :, :1], mask[:, :, :1] if has_mask else None, bias[:, :, :1]
    for wrong in (bias[:, :1], bias[..., :1], bias[0], bias.expand(2, 4, 2, 9)):
        with pytest.raises(ValueError, match=r"`position_bias` must.*\[2, 4, 1, 9\].*got \["):
            magi_attention(module, q, k, v, mask, position_bias=wrong)
