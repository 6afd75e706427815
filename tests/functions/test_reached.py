"""What a function can reach, and which changes of it are seen."""

import functools
import gc
import operator
import os
import sys
import types
import weakref
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask

import magi_compile
from magi_compile.functions.reached import Reached

NUMBER, TABLE = 3, torch.arange(4)
CONFIG = types.ModuleType("config")


def of_globals(q):
    return q < NUMBER


def calls_another(q):
    return of_globals(q)


class Window:
    size = 3

    def __init__(self):
        self.own, self.inner = 3, types.SimpleNamespace(deep=[3, {"key": 3}])

    def __call__(self, q):
        return q < self.own

    def method(self, q):
        return q < self.size

    @property
    def computed(self):
        return self.own

    def by_property(self, q):
        return q < self.computed

    def deep(self, q):
        return q < self.inner.deep[1]["key"]

    @staticmethod
    def limit():
        return 3


class Narrow(Window):
    def by_super(self, q):
        return q < super().computed


class Operators:
    def __init__(self):
        self.store = [3]

    def __getitem__(self, index):
        return self.store[index]

    def __radd__(self, other):
        return other + self.store[0]


class Meta(type):
    @property
    def limit(cls):
        return cls.own


class OfMeta(metaclass=Meta):
    own = 3


class Slots:
    __slots__ = ("limit",)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4))
        self.child = nn.Module()
        self.child.limit = 3

    def mask(self, q):
        return self.table[q] < self.child.limit


def closure():
    limit = 3

    def mask(q):
        return q < limit

    def change():
        nonlocal limit
        limit = 4

    return mask, change


def changes_of_what_is_not_named():
    """Places that Python looks at before or behind those in which it found a name, or that no code names."""
    fresh, narrow = types.SimpleNamespace(), Narrow()
    del narrow.own, narrow.inner  # so that it has no attributes of its own
    yield "first attribute", narrow.method, lambda: setattr(narrow, "size", 5)
    yield "attribute of a subclass", narrow.method, lambda: setattr(Narrow, "size", 5)
    yield (
        "super",
        Narrow().by_super,
        lambda: setattr(Window, "computed", property(lambda self: 4)),
    )
    yield "property of a metaclass", lambda q: q < OfMeta.limit, lambda: setattr(OfMeta, "own", 4)
    item, sum_ = Operators(), Operators()
    yield "item by an operator", lambda q: q < item[0], lambda: setattr(item, "store", [4])
    yield "operator", lambda q: q + sum_ < 9, lambda: sum_.store.append(4)

    def keyword(q, *, limit=3):
        return q < limit

    yield "keyword default", keyword, lambda: keyword.__kwdefaults__.update(limit=4)

    def attribute(q):
        return q < attribute.limit

    attribute.limit = 3
    yield "attribute of a function", attribute, lambda: setattr(attribute, "limit", 4)

    def imports(q):
        from config_of_test_reached import LIMIT

        return q < LIMIT

    config = sys.modules["config_of_test_reached"] = types.ModuleType("config_of_test_reached")
    config.LIMIT = 3
    yield "import", imports, lambda: setattr(config, "LIMIT", 4)

    def has_default(q):
        try:
            return q < fresh.limit
        except AttributeError:
            return q < 3

    yield "attribute that was absent", has_default, lambda: setattr(fresh, "limit", 4)
    hidden = types.FunctionType((lambda q: q < min(3, 4)).__code__, {"__builtins__": __builtins__})
    yield "builtin", hidden, lambda: hidden.__globals__.update(min=max)


def changes():
    """Functions by name, and what changes what they reach."""

    def change_global():
        global NUMBER
        NUMBER += 1

    yield "global", of_globals, change_global
    yield "global of a function that is called", calls_another, change_global
    yield "closure", *closure()
    inner, change = closure()
    yield "function in a closure", and_masks(inner, inner), change
    default = [3]

    def with_default(q, limit=default):
        return q < limit[0]

    yield "item of a default", with_default, lambda: default.__setitem__(0, 4)

    def with_other_default(q, limit=3):
        return q < limit

    yield "default", with_other_default, lambda: setattr(with_other_default, "__defaults__", (4,))
    window = Window()
    yield "attribute", window, lambda: setattr(window, "own", 4)
    window = Window()
    yield "attribute of the class", window.method, lambda: setattr(Window, "size", 4)
    yield "attribute in front of the class", window.method, lambda: setattr(window, "size", 5)
    yield "property", window.by_property, lambda: setattr(window, "own", 4)
    yield "nested", window.deep, lambda: window.inner.deep[1].update(key=4)
    yield "nested list", window.deep, lambda: window.inner.deep.append(4)
    yield (
        "static method",
        lambda q: q < Window.limit(),
        lambda: setattr(Window, "limit", staticmethod(lambda: 4)),
    )
    slots = Slots()
    slots.limit = 3
    yield "slot", lambda q: q < slots.limit, lambda: setattr(slots, "limit", 4)
    CONFIG.LIMIT = 3
    yield "attribute of a module", lambda q: q < CONFIG.LIMIT, lambda: setattr(CONFIG, "LIMIT", 4)
    module = Module()
    yield "buffer", module.mask, lambda: setattr(module, "table", torch.arange(4))
    yield "attribute of a submodule", module.mask, lambda: setattr(module.child, "limit", 4)
    table = {"limit": 3}
    part = functools.partial(lambda q, table: q < table["limit"], table=table)
    yield "item of an argument of partial", part, lambda: table.update(limit=4)

    def code(q):
        return q < 3

    yield from changes_of_what_is_not_named()
    yield "code", code, lambda: setattr(code, "__code__", (lambda q: q < 4).__code__)


@pytest.mark.parametrize("name", [name for name, *_ in changes()])
def test_changes_are_seen(name):
    function, change = next((f, c) for n, f, c in changes() if n == name)
    reached = Reached(function, "mask_mod")
    assert reached.is_unchanged()
    change()
    assert not reached.is_unchanged()


class Table:
    def __init__(self):
        self.held = 3

    def __getitem__(self, q):
        return q < self.held


def test_methods_that_no_code_names():
    table = Table()
    mask = lambda q: table[q]  # noqa: E731
    reached = Reached(mask, "mask_mod")
    assert reached.is_unchanged()
    table.held = 4
    assert not reached.is_unchanged()


class Dynamic:
    def __getattr__(self, name):
        return 3


class Looks:
    def __getattribute__(self, name):
        return object.__getattribute__(self, name)


OPAQUE = [deque([3]), {3}, Dynamic(), Looks(), operator.attrgetter("own")]


@pytest.mark.parametrize("held", OPAQUE, ids=lambda x: type(x).__name__)
def test_what_changes_unseen_is_never_called_unchanged(held):
    assert not Reached(lambda q: q in held, "mask_mod").is_unchanged()


def test_a_function_that_looks_names_up_is_never_called_unchanged():
    window, name = Window(), "own"
    assert not Reached(lambda q: q < getattr(window, name), "mask_mod").is_unchanged()
    assert not Reached(lambda q: q < int(os.environ["LIMIT"]), "mask_mod").is_unchanged()


def test_it_keeps_nothing_alive():
    window = Window()
    window.loop = window
    reached, alive = Reached(window.method, "mask_mod"), weakref.ref(window)
    del window
    gc.collect()
    assert alive() is None
    assert not reached.is_unchanged()


def test_names():
    module = Module()
    other = torch.arange(2)

    def mask(q, first=other):
        return module.table[q] + TABLE[q] + first[0]

    reached = Reached(mask, "mask_mod")
    names = {id(module.table): "table", id(TABLE): "TABLE", id(other): "first"}
    assert reached.names == names


def test_eager_attention_with_a_mask_that_changes_when_it_is_called():
    calls = []

    def mask_mod(b, h, q, kv):
        calls.append(1)
        return (q - kv < 5 * len(calls)) & (q >= kv)

    i, j = torch.arange(S)[:, None], torch.arange(S)
    mask = create_block_mask(mask_mod, None, None, S, S, device="cpu", BLOCK_SIZE=S)
    for _ in range(3):
        q, k, v = INPUTS
        got = magi_compile.flex_attention(q, k, v, block_mask=mask)
        widths = range(5, 5 * len(calls) + 5, 5)
        wanted = [(i >= j) & (i - j < width) for width in widths]
        dense = [
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=x) for x in wanted
        ]
        assert any(torch.allclose(got, x, atol=1e-5) for x in dense)
        calls.append(1)


S = 64
INPUTS = torch.randn(3, 1, 2, S, 16)


def check(mask, visible):
    q, k, v = INPUTS
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    got = magi_compile.flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_eager_attention_follows():
    """An attribute that is bound anew, a table that is, and block lists that are written to."""
    i, j = torch.arange(S)[:, None], torch.arange(S)
    band = types.SimpleNamespace(width=5, document=i[:, 0] // 30)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q - kv < band.width) & (band.document[q] == band.document[kv])

    def visible():
        same = band.document[:, None] == band.document
        return (i >= j) & (i - j < band.width) & same

    mask = create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, S, S, device="cpu", BLOCK_SIZE=64
    )
    check(mask, i >= j)
    mask.mask_mod = mask_mod
    check(mask, visible())
    band.width = 20
    check(mask, visible())
    band.document = i[:, 0] // 10
    check(mask, visible())
    band.document.copy_(i[:, 0] // 40)
    check(mask, visible())
