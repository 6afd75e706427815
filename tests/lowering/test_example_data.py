"""What a graph is compiled with decides whether its masks have intervals, on a GPU, where an op would wait."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from magi_compile.lowering import masks
from magi_compile.lowering.backend import make_backend
from magi_compile.lowering.emit import value_of
from magi_compile.lowering.example_data import example_of, order_reasons
from magi_compile.lowering.flex_call import FlexCall, graphs
from magi_compile.lowering.masks import MaskRoute
from magi_compile.lowering.options import LoweringOptions
from magi_compile.masks import row_intervals
from magi_compile.masks.evaluation.sizes import ONE_MASK, Heads, MaskSizes
from magi_compile.masks.program.trace import read_graph

LENGTH = 256
IN_ORDER = torch.arange(LENGTH) // 40
SHUFFLED = IN_ORDER[torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))]


def reasons_of(function, *inputs, capacity=512, heads=ONE_MASK):
    """What `order_reasons` says of the FlexAttention call in `function`."""
    found = []

    def backend(gm, example_inputs):
        hop = torch.ops.higher_order.flex_attention
        for module in graphs(gm):
            for node in module.graph.nodes:
                if node.target is hop:
                    call = FlexCall.parse(module, node, gm)
                    captures = [value_of(x) for x in call.mask_buffers]
                    program = read_graph(call.mask_mod, captures)
                    sizes = MaskSizes(1, LENGTH, LENGTH, heads)
                    cpu = torch.device("cpu")
                    where = (call.table_sources, [], sizes, capacity, cpu)
                    found.append(order_reasons(program, *where))
        return lambda *args: (qkv(),)  # nothing runs

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (reasons,) = found
    return reasons


def qkv():
    return torch.randn(1, 2, LENGTH, 16)


def documents(ids):
    return lambda b, h, q, kv: ids[q] == ids[kv]


def attend(x, mask):
    return flex_attention(x, x, x, block_mask=mask)


def made_inside(x, document):
    ids = document.clamp(min=0) + 1
    mask = create_block_mask(documents(ids), None, None, LENGTH, LENGTH, device="cpu")
    return flex_attention(x, x, x, block_mask=mask)


def outside(ids):
    return create_block_mask(documents(ids), None, None, LENGTH, LENGTH, device="cpu")


def test_data_in_order_have_intervals():
    assert reasons_of(attend, qkv(), outside(IN_ORDER)) == ()
    assert reasons_of(made_inside, qkv(), IN_ORDER) == ()


def test_data_out_of_order_have_none():
    for reason in (
        reasons_of(attend, qkv(), outside(SHUFFLED)),
        reasons_of(made_inside, qkv(), SHUFFLED),
    ):
        assert "must hold equal values next to each other" in reason[0]
        assert "lies in several places" in reason[0]


def test_more_slices_than_there_is_room_for_are_a_reason():
    (reason,) = reasons_of(attend, qkv(), outside(IN_ORDER), capacity=3)
    assert "must fit in 3 slices" in reason


def test_data_of_one_head_out_of_order():
    def mask_of(ids):
        def mask_mod(b, h, q, kv):
            return ids[h, q] == ids[h, kv]

        return create_block_mask(mask_mod, None, 2, LENGTH, LENGTH, device="cpu")

    heads, in_order = Heads(2, 2), torch.stack([IN_ORDER, IN_ORDER // 2])
    assert reasons_of(attend, qkv(), mask_of(in_order), heads=heads) == ()
    broken = torch.stack([IN_ORDER, SHUFFLED])
    (reason,) = reasons_of(attend, qkv(), mask_of(broken), heads=heads)
    assert "of batch entry 0 and head 1 looks up lies in several places" in reason


def test_inside_a_checkpointed_region():
    def region(x, mask):
        return checkpoint(attend, x, mask, use_reentrant=False)

    x = qkv()
    assert reasons_of(region, x, outside(SHUFFLED)) != ()
    assert reasons_of(region, x, outside(IN_ORDER)) == ()


def test_data_that_mean_nothing_are_found_when_they_run():
    beyond = torch.full((LENGTH,), LENGTH + 5)
    table = torch.arange(LENGTH)

    def mask_mod(b, h, q, kv):
        return kv <= table[beyond[q]]

    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, LENGTH, LENGTH, device="cpu")
    mask.mask_mod = mask_mod
    assert reasons_of(attend, qkv(), mask) == ()


def test_data_of_an_activation_are_not_computed():
    """Of many operations, or of those that draw numbers, nobody knows."""
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(80)])

    def deep(x, y):
        ids = layers(y).argmax(-1)
        mask = create_block_mask(documents(ids), None, None, LENGTH, LENGTH, device="cpu")
        return flex_attention(x, x, x, block_mask=mask)

    def random(x, document):
        ids = document + torch.randint(0, 5, (LENGTH,))
        mask = create_block_mask(documents(ids), None, None, LENGTH, LENGTH, device="cpu")
        return flex_attention(x, x, x, block_mask=mask)

    assert reasons_of(deep, qkv(), torch.randn(LENGTH, 4)) == ()
    assert reasons_of(random, qkv(), SHUFFLED) == ()


def test_an_example_is_that_of_the_call():
    seen = []

    def backend(gm, example_inputs):
        (node,) = (x for x in gm.graph.nodes if x.name == "twice")
        seen.append(example_of(node))
        return gm

    def function(x):
        twice = x * 2
        return twice + 1

    def renamed(gm, example_inputs):
        for node in gm.graph.nodes:
            if node.op == "call_function" and 2 in node.args:
                node.name = "twice"
        return backend(gm, example_inputs)

    x = torch.arange(5)
    torch._dynamo.reset()
    torch.compile(function, backend=renamed)(x)
    assert torch.equal(seen[0], x * 2)


@pytest.mark.parametrize("is_asked", [False, True])
def test_bits_on_request(is_asked):
    """With data in order, too."""
    ways = []
    of = MaskRoute.of
    options = LoweringOptions(bits=is_asked)

    def watched(call, options):
        ways.append(of(call, options))
        return ways[-1]

    x = qkv()
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks.MaskRoute, "of", watched)
        compiled = torch.compile(attend, backend=make_backend("eager", options))
        out = compiled(x, outside(IN_ORDER))
    (route,) = ways
    assert bool(route.reasons) == is_asked
    torch.testing.assert_close(out, attend(x, outside(IN_ORDER)))


def test_intervals_without_data_are_evaluated_once(monkeypatch):
    """For the order of computed tables, for the room, and for the graph."""
    evaluated = []

    def counted(*args, **kwargs):
        evaluated.append(args)
        return row_intervals(*args, **kwargs)

    monkeypatch.setattr(masks, "row_intervals", counted)
    ends = [40, 80, 200, LENGTH]

    def made_of_nothing(x):
        def mask_mod(b, h, q, kv):
            ids = torch.searchsorted(torch.tensor(ends), torch.arange(LENGTH), right=True)
            return ids[q] == ids[kv]

        mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, device="cpu")
        return flex_attention(x, x, x, block_mask=mask)

    x = qkv()
    torch._dynamo.reset()
    out = torch.compile(made_of_nothing, backend=make_backend("eager"))(x)
    torch.testing.assert_close(out, made_of_nothing(x))
    assert len(evaluated) == 1
