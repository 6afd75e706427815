"""`attn_implementation="magi"` in one graph, with the numbers of eager attention, whatever the documents."""

import pytest
import torch

hf = pytest.importorskip("transformers")

import magi_compile  # noqa: E402
from magi_compile.integrations import transformers as door  # noqa: E402
from magi_compile.lowering.report import REPORT  # noqa: E402
from tests.integrations.models import (  # noqa: E402
    INPUTS,
    LAYERS,
    MODELS,
    assert_same,
    cu_seq_lens,
    inputs_of_eager,
    make_model,
    positions,
    step,
    tokens,
    uncounted,
)


def quick():
    """The lowering in front of a compiler that is quick on a CPU."""
    return magi_compile.make_backend("aot_eager")


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check(name, inputs, forwards, layers=LAYERS, **compiler):
    """One graph for all of `inputs`, which differ in values alone; all attention on our kernel,
    the numbers of eager attention."""
    model = make_model(name, num_hidden_layers=layers)
    forward = torch.compile(model, fullgraph=True, **compiler)
    eager = make_model(name, "eager", num_hidden_layers=layers)
    for given in inputs:
        model.zero_grad()
        eager.zero_grad()
        forwards.clear()
        ours = step(model, given, forward)
        assert len(forwards) == layers
        assert_same(ours, step(eager, inputs_of_eager(eager, name, given)))
    assert not REPORT.refused
    assert num_graphs() == 1


# Full attention, windows with a soft-cap, sinks, an encoder.
MOST_DIFFERENT = ("gemma2", "gpt_oss", "modernbert")  # llama has inputs of other kinds below


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in MOST_DIFFERENT else pytest.mark.slow) for x in MODELS],
)
def test_packed(name, forwards):
    check(name, [INPUTS["packed"]()], forwards, backend=quick())


@pytest.mark.parametrize(
    ("name", "kinds"), [("gemma3", ["left_padded", "right_padded"]), ("modernbert", ["plain"])]
)
def test_other_inputs(name, kinds, forwards):
    check(name, [INPUTS[kind]() for kind in kinds], forwards, backend=quick())


def test_positions_that_are_no_borders(forwards):
    """One graph decides by the data, also whether there is padding."""
    kinds = ("hole", "zeros", "gap", "repeats")
    check("llama", [uncounted(kind) for kind in kinds], forwards, layers=1, backend=quick())


def test_autocast(forwards):
    """In one graph, with the numbers of eager code."""
    model = make_model("llama", num_hidden_layers=1)
    forward = torch.compile(model, backend=quick(), fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours = forward(input_ids=tokens(), **INPUTS["packed"]()).logits
        assert len(forwards) == 1
        assert not REPORT.refused
        wanted = model(input_ids=tokens(), **INPUTS["packed"]()).logits
    torch.testing.assert_close(ours, wanted, atol=2e-2, rtol=2e-2)


def test_inductor(forwards):
    check("llama", [INPUTS["packed"]()], forwards, layers=1, backend="magi")


@pytest.mark.slow
def test_enable(forwards):
    """Stock Inductor, with the flag."""
    with torch._inductor.config.patch(force_disable_caches=True), magi_compile.enabled():
        check("llama", [INPUTS["packed"]()], forwards, layers=1)


@pytest.mark.parametrize(
    ("name", "layers", "layouts", "wanted"),
    [
        ("llama", 1, [(192,), (100, 40, 52), (300, 20), (200,), (150, 250)], [1, 1, 2, 2, 2]),
        pytest.param(
            *("gpt_oss", LAYERS, [(192,), (100, 40, 52), (1,) * 5 + (187,)], [1, 1, 1]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["llama", "gpt_oss"],
)
def test_new_documents_compile_nothing(name, layers, layouts, wanted):
    """Neither do new lengths, after the second one."""
    model = make_model(name, num_hidden_layers=layers)
    forward = torch.compile(model, backend=quick(), fullgraph=True)
    graphs = []
    for lengths in layouts:
        batch = tokens(1, sum(lengths))
        with torch.no_grad():
            ours = forward(input_ids=batch, position_ids=positions(lengths)).logits
            alone = [model(input_ids=part).logits for part in batch.split(lengths, 1)]
        torch.testing.assert_close(ours, torch.cat(alone, 1), atol=1e-4, rtol=1e-4)
        graphs.append(num_graphs())
    assert graphs == wanted


def test_layers_share_what_lists_say():
    """One conversion for each kind of mask, though the lists reach every layer by itself."""
    graphs = []

    def keep(gm, _):
        graphs.append(gm)
        return gm.forward

    model, batch = make_model("modernbert"), tokens(batch=1)
    forward = torch.compile(model, backend=magi_compile.make_backend(keep), fullgraph=True)
    inputs = {"position_ids": positions(), **cu_seq_lens()}
    with torch.no_grad():
        ours = forward(input_ids=batch, **inputs).logits
        torch.testing.assert_close(
            ours, model(input_ids=batch, **inputs).logits, atol=1e-4, rtol=1e-4
        )
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("magi.attention" in name for name in called) == LAYERS
    assert sum(name.startswith("magi.mask_") for name in called) == 2


def test_masks_from_outside_of_a_graph(forwards):
    """Layers that are compiled by themselves get the mask that eager code has made."""
    model = make_model("gemma3")
    for layer in model.model.layers:
        layer.compile(backend=quick(), fullgraph=True)
    ours = step(model, INPUTS["packed"]())
    assert len(forwards) == LAYERS
    assert not REPORT.refused
    assert_same(ours, step(make_model("gemma3", "eager"), INPUTS["packed"]()))


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "gpt_oss"])
def test_gradient_checkpointing(name, forwards):
    model = make_model(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ours = step(model, INPUTS["packed"](), torch.compile(model, backend=quick(), fullgraph=True))
    assert len(forwards) == 2 * LAYERS
    model = make_model(name, "eager").train()
    assert_same(ours, step(model, inputs_of_eager(model, name, INPUTS["packed"]())))


def test_unknown_arguments_are_named(warnings_of_ours):
    """Without a break."""
    model = make_model("llama", num_hidden_layers=1)
    forward = torch.compile(model, backend=quick(), fullgraph=True)
    with torch.no_grad():
        forward(input_ids=tokens(), invented=torch.ones(3))
    assert len(warnings_of_ours()) == 1


@pytest.fixture
def traceable_masks():
    door.register_flex_attention_mask()
    yield
    door.register_flex_attention_mask(False)


@pytest.mark.parametrize("kind", [pytest.param("packed", marks=pytest.mark.slow), "left_padded"])
def test_stock_flex_attention_in_one_graph(kind, forwards, traceable_masks):
    model = make_model("llama", "flex_attention")
    ours = step(model, INPUTS[kind](), torch.compile(model, backend=quick(), fullgraph=True))
    assert len(forwards) == LAYERS
    assert num_graphs() == 1
    assert_same(ours, step(make_model("llama", "eager"), INPUTS[kind]()))


def test_stock_flex_attention_in_eager_code(traceable_masks):
    """The masks are those of transformers."""
    from transformers.masking_utils import create_causal_mask, flex_attention_mask

    config = make_model("llama", "flex_attention").config
    made = create_causal_mask(config, torch.empty(1, 192, 1), None, None, positions())
    door.register_flex_attention_mask(False)
    theirs = create_causal_mask(config, torch.empty(1, 192, 1), None, None, positions())
    assert torch.equal(made.to_dense(), theirs.to_dense())
    assert hf.AttentionMaskInterface._global_mapping["flex_attention"] is flex_attention_mask
