"""From mask_mods to programs: the text they become, and all reasons where they do not."""

import functools
import operator
import re

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from magi_compile.masks import MaskProgram, UnsupportedMaskError, trace_mask_mod
from tests.masks.support.helpers import trace_graph

document = torch.tensor([0] * 40 + [1] * 60)
bytes_ = document.to(torch.uint8)
of_entries = torch.stack([document, document.flip(0)])


def text_of(mask_mod):
    program, *_ = trace_mask_mod(mask_mod)
    assert MaskProgram.parse(program.text) == program
    return str(program)


def test_names_of_captured_tensors():
    lengths = torch.tensor([50, 80])

    class Padding:
        def __init__(self):
            self.limits = lengths

        def __call__(self, b, h, q, kv):
            return kv < self.limits[b]

    least = torch.tensor(3)

    def same(b, h, q, kv, table, unset=least):
        return (table[q] == table[kv]) & (q >= unset)

    closure = and_masks(Padding(), lambda b, h, q, kv: document[q] == document[kv])
    assert text_of(closure) == ("(kv < t0[b]) & (t1[q] == t1[kv])  # t0: limits, t1: document")
    partial = functools.partial(same, table=document)
    assert text_of(partial) == ("(t0[q] == t0[kv]) & (q >= t1)  # t0: table, t1: unset")
    assert text_of(Padding().__call__) == "kv < t0[b]  # t0: limits"
    held = [lambda b, h, q, kv: kv < lengths[b]]
    assert text_of(lambda *args: held[0](*args)) == "kv < t0[b]  # t0: lengths"


def test_one_tensor_is_one_table():
    program, tables, _ = trace_mask_mod(
        lambda b, h, q, kv: (document[q] == document[kv]) | (of_entries[b][q] == document[kv])
    )
    assert str(program.expr) == "(t0[q] == t0[kv]) | (t1[b, q] == t0[kv])"
    assert tables[0] is document
    assert tables[1] is of_entries


@pytest.mark.parametrize(
    ("mask_mod", "text"),
    [
        (lambda b, h, q, kv: kv >= 3, "kv >= 3"),
        (lambda b, h, q, kv: 3 - q < -kv + +q, "-q + 3 < -kv + q"),
        (lambda b, h, q, kv: 9 // (q + 1) > 9 % (q + 1), "9 // (q + 1) > 9 % (q + 1)"),
        (lambda b, h, q, kv: (q >= kv).int() == 1, "where(q >= kv, 1, 0) == 1"),
        (lambda b, h, q, kv: (q - kv).bool(), "q - kv != 0"),
        (lambda b, h, q, kv: torch.clamp(q, 2, 5) > kv, "min(max(q, 2), 5) > kv"),
        (lambda b, h, q, kv: q.clamp_min(2).clamp_max(5) > kv, "min(max(q, 2), 5) > kv"),
        (lambda b, h, q, kv: torch.rsub(q, 7) > kv << 1, "-q + 7 > kv * 2"),
        (lambda b, h, q, kv: torch.div(q, 2, rounding_mode="floor") > kv, "q // 2 > kv"),
        (lambda b, h, q, kv: q.to(torch.int32).clone().detach() > kv, "q > kv"),
        (lambda b, h, q, kv: q.to("cpu").contiguous() > kv.long(), "q > kv"),
        (lambda b, h, q, kv: torch.ones_like(q) > kv, "1 > kv"),
        (lambda b, h, q, kv: (q > kv) | torch.zeros_like(q > kv), "q > kv"),
        (lambda b, h, q, kv: q.new_full((), 4) > kv, "4 > kv"),
        (lambda b, h, q, kv: torch.full_like(q, 4) > kv, "4 > kv"),
        (lambda b, h, q, kv: q.new_zeros(()) < kv, "0 < kv"),
        (lambda b, h, q, kv: torch.logical_xor(q > kv, q > 3), "(q > kv) ^ (q > 3)"),
        (lambda b, h, q, kv: operator.ixor(q > kv, q > 3), "(q > kv) ^ (q > 3)"),
        (lambda b, h, q, kv: q - kv <= 2.5, "q - kv <= 2"),
        (lambda b, h, q, kv: q - kv < 2.5, "q - kv < 3"),
        (lambda b, h, q, kv: (q - kv == 2.5) | (q > kv), "q > kv"),
        (lambda b, h, q, kv: ~(q - kv) < 4, "-q + kv - 1 < 4"),
        (lambda b, h, q, kv: (q > kv) + (q > 3), "(q > kv) | (q > 3)"),
        (lambda b, h, q, kv: (q & ~15) + (7 & q) >= kv, "q // 16 * 16 + q % 8 >= kv"),
        (lambda b, h, q, kv: torch.div(q, 2, rounding_mode="trunc") > kv, "q // 2 > kv"),
        (
            lambda b, h, q, kv: torch.div(q - 9, 2, rounding_mode="trunc") > kv,
            "where(q - 9 < 0, -((-q + 9) // 2), (q - 9) // 2) > kv",
        ),
    ],
)  # fmt: skip
def test_spellings(mask_mod, text):
    assert text_of(mask_mod) == text
    graph = torch.fx.symbolic_trace(mask_mod)
    assert str(trace_graph(graph, [])) == text


def test_numpy_scalars_are_numbers():
    assert text_of(lambda b, h, q, kv: q - np.int64(5) >= kv * np.array(2)) == "q - 5 >= kv * 2"
    assert text_of(lambda b, h, q, kv: (q >= kv) & np.bool_(True)) == "q >= kv"
    assert text_of(lambda b, h, q, kv: np.int32(5) - q > kv) == "-q + 5 > kv"


@pytest.mark.parametrize(
    ("mask_mod", "reasons"),
    [
        (
            lambda b, h, q, kv: (h > 1) & (torch.sin(q + kv) > 0.5) & ((q - kv) / 2 > 3) & (q * kv < 4),
            [
                r"depends on the head \(h\)",
                "`sin` is not an operation on masks",
                r"a division that does not round down; write `\(q - kv\) // 2`",
                "kv is multiplied or divided by `q`",
            ],
        ),
        (lambda b, h, q, kv: of_entries[q, kv] == 1, [r"`of_entries\[q, kv\]` looks up a row and a key"]),
        (lambda b, h, q, kv: document[q - kv] == 1, [r"`document\[q - kv\]` looks up a row and a key"]),
        (lambda b, h, q, kv: q * kv < 9, ["kv is multiplied or divided by `q`"]),
        (lambda b, h, q, kv: kv // (q + 1) < 9, [r"kv is multiplied or divided by `q \+ 1`"]),
        (lambda b, h, q, kv: q // (kv + 1) < 9, ["`q // .* mixes rows and keys"]),
        (lambda b, h, q, kv: (kv * 2 + document[kv] - kv * kv) < q * 2 + document[q] - q * q,
         ["does not grow along the keys"]),
        (lambda b, h, q, kv: document[kv] - kv * kv == document[q] - q * q, ["has no order along the keys"]),
        (lambda b, h, q, kv: kv // 3 + (kv + q) // 5 == q, ["depend on the key in two ways"]),
        (lambda b, h, q, kv: (kv // 3 * 2 + q) // 5 == q, ["is not a step function of kv"]),
        (lambda b, h, q, kv: (kv % 6 * 4 - kv % 4 < q % 6 * 4 - q % 4) & (document[kv] + kv % 3 == document[q] + q % 3),
         ["`kv % 6 \\* 4 - kv % 4` depends on the key by more than `kv % 6` alone", "more than `kv % 3` alone"]),
        (lambda b, h, q, kv: kv * kv % 5 == q, [r"`kv \* kv % 5` repeats along the keys, but not"]),
        (lambda b, h, q, kv: kv % document[q] == q, [r"`kv % document\[q\]` repeats along the keys in "
         r"steps that are not one number"]),
        (lambda b, h, q, kv: q, ["a mask must be a truth value, got the integer `q`"]),
        (lambda b, h, q, kv: document[q], [r"a mask must be a truth value, got the integer `document\[q\]`"]),
        (lambda b, h, q, kv: "yes", ["returns something else than a truth value: `'yes'`"]),
        (lambda b, h, q, kv: document > kv, [r"truth value: `\(document > kv\)` has shape \[100\]"]),
        (lambda b, h, q, kv: q - kv > 2.0**30 + 0.5, ["is compared with `q - kv`, which is not exact"]),
        (lambda b, h, q, kv: (q - kv).float() < 3, ["`q - kv` is torch.float32"]),
        (lambda b, h, q, kv: (q - kv) << 70 > 3, ["a shift by `70`"]),
        (lambda b, h, q, kv: q[0] > kv, [r"`q\[0\]` cannot be followed"]),
        (lambda b, h, q, kv: of_entries[b, ...] > kv, [r"`\(of_entries\[b, ...\] > kv\)` has shape \[100\]"]),
        (lambda b, h, q, kv: torch.add(q, kv, alpha=2) > 4, ["`add` with keyword arguments"]),
        (lambda b, h, q, kv: q.clamp(1, 2, 3) > 4, [r"`q.clamp\(1, 2, 3\)` cannot be followed"]),
        (lambda b, h, q, kv: q.new_ones((3,)) > kv, [r"`q.new_ones\(3\)` has shape \[3\]"]),
        (lambda b, h, q, kv: q & kv, ["`&` of the bits of `q` and `kv`"]),
        (lambda b, h, q, kv: (bytes_[q] | bytes_[kv]) == 3, [r"`\|` of the bits of `bytes_\[q\]` and `bytes_\[kv\]`"]),
        (lambda b, h, q, kv: of_entries[q] == kv, [r"of shape|has shape \[100\]"]),
        (lambda b, h, q, kv: bytes_[q] - bytes_[kv] >= 0, [r"`bytes_\[q\] - bytes_\[kv\]` may wrap "
         r"around in torch.uint8; convert the captured tensor to torch.int32"]),
        (lambda b, h, q, kv: (q * 2 - kv).to(torch.int8) >= 3, ["`q \\* 2 - kv` may wrap around in torch.int8"]),
        (lambda b, h, q, kv: torch.rand(()) + q > kv, ["is random"]),
        (lambda b, h, q, kv: torch.sin(q - kv) == torch.sin(q - kv), ["`sin` is not an operation on masks"]),
        (lambda b, h, q, kv: torch.where(q - kv < torch.sign(q - kv), q > kv, q > kv),
         ["`sign` is not an operation on masks"]),
    ],
)  # fmt: skip
def test_refusals(mask_mod, reasons):
    with pytest.raises(UnsupportedMaskError) as error:
        trace_mask_mod(mask_mod)
    found = error.value.reasons
    assert len(found) == len(reasons), found
    for reason in reasons:
        assert any(re.search(reason, one) for one in found), found
    assert str(error.value) == "this mask is not representable yet: " + "; ".join(found)


def test_a_table_may_be_the_mask():
    flags = document > 0
    program, *_ = trace_mask_mod(lambda b, h, q, kv: flags[q])
    assert str(program.expr) == "t0[q]"


@pytest.mark.parametrize(
    ("mask_mod", "name"),
    [
        (lambda b, h, q, kv: q >= kv if q > 3 else kv > 2, "bool"),
        (lambda b, h, q, kv: max(3, q) > kv, "bool"),
        (lambda b, h, q, kv: q.item() > 3, "item"),
        (lambda b, h, q, kv: int(q) > 3, "int"),
        (lambda b, h, q, kv: float(q) > 3, "float"),
        (lambda b, h, q, kv: [1, 2, 3][q] > kv, "index"),
        (lambda b, h, q, kv: 3 in q, "contains"),
        (lambda b, h, q, kv: len(q) > 3, "len"),
        (lambda b, h, q, kv: list(q) > 3, "iter"),
        (lambda b, h, q, kv: q.tolist() > 3, "tolist"),
    ],
)
def test_control_flow(mask_mod, name):
    with pytest.raises(UnsupportedMaskError, match=rf"`{name}` of `\(?q.*needs its value"):
        trace_mask_mod(mask_mod)


def test_symbols_look_like_scalars():
    seen = []

    def mask_mod(b, h, q, kv):
        seen.append((q.dim(), q.ndim, q.shape, q.size(), q.numel(), q.dtype, q.device.type))
        assert not hasattr(q, "__array__")
        return q > kv

    trace_mask_mod(mask_mod)
    assert seen == [(0, 0, (), (), 1, torch.int64, "cpu")]


def test_errors_of_the_mask_mod_are_its_own():
    with pytest.raises(ZeroDivisionError):
        trace_mask_mod(lambda b, h, q, kv: q > 1 // 0)


# Graphs


def graph_of(build, num_captures=0, **attributes):
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("b", "h", "q", "kv")]
    nodes += [graph.placeholder(f"capture{i}") for i in range(num_captures)]
    graph.output(build(graph, *nodes))
    return torch.fx.GraphModule(attributes, graph)


def test_graph_of_aten_operations():
    aten = torch.ops.aten

    def build(graph, b, h, q, kv, table, window):
        row = graph.call_function(aten.index.Tensor, (table, [b, q]))
        key = graph.call_function(operator.getitem, (table, b))
        key = graph.call_function(operator.getitem, (key, kv))
        same = graph.call_function(aten.eq.Tensor, (row, key))
        gap = graph.call_function(aten.sub.Tensor, (q, kv))
        near = graph.call_method("__le__", (gap, window))
        return (graph.call_function(aten.bitwise_and.Tensor, (same, near)),)

    program = trace_graph(graph_of(build, 2), [of_entries, 7], names=["document"])
    assert str(program) == "(t0[b, q] == t0[b, kv]) & (q - kv <= s0)  # t0: document"


def test_graph_with_an_aliased_in_place_operation():
    def build(graph, b, h, q, kv, reuse):
        causal = graph.call_function(operator.ge, (q, kv))
        both = graph.call_function(
            operator.iand, (causal, graph.call_function(operator.gt, (q, 3)))
        )
        return graph.call_function(operator.xor, (both, causal)) if reuse else both

    once = trace_graph(graph_of(lambda *args: build(*args, False)), [])
    assert str(once) == "(q >= kv) & (q > 3)"
    again = trace_graph(graph_of(lambda *args: build(*args, True)), [])
    assert str(again) == "False"  # since both are one value


def test_graph_with_an_attribute():
    graph = graph_of(lambda graph, b, h, q, kv: graph.get_attr("limit"), limit=torch.tensor(3))
    with pytest.raises(UnsupportedMaskError, match="`get_attr limit` in the graph"):
        trace_graph(graph, [])


def test_wrong_captures():
    graph = graph_of(lambda graph, b, h, q, kv, table: table, 1)
    with pytest.raises(ValueError, match=r"`captures` must have 1 entries.* got 0"):
        trace_graph(graph, [])


@pytest.mark.parametrize(
    ("text", "by_keys"),
    [
        ("(t0[q] == t0[kv]) & (q >= kv)", [False, True]),
        ("kv * t0 >= q", [False, True]),  # of a sign, not of an order
        ("q >= kv", [False]),
        ("(t0[kv] <= t0[q]) & (t0[q] < t1[kv])", [True, False]),
        ("(q >= kv) & (q < t0[kv])", [True, False]),
        ("t0[kv] - kv * kv == q", [True]),
        ("(t0[q] == t0[kv]) & (kv % 7 == q % 5)", [False]),  # repeats along the rows
        ("t0[q, kv]", [False]),
    ],
)
def test_ways(text, by_keys):
    """What takes less order for granted comes first."""
    assert [way.by_keys for way in MaskProgram.parse(text).ways] == by_keys
