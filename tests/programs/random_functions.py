"""Random mask_mods and score_mods as source text, and what becomes of them beside PyTorch's own FlexAttention.

A program is text that can be pasted: tensors, a mask_mod or a score_mod, sizes. PyTorch says what it means
(`create_mask`, eager `flex_attention`); every public way of this package into it must then give the same, or refuse it
with reasons. Anything else is a failure, MaskDataError too: PyTorch has taken the data.

    python -m tests.programs.random_functions --count 10000 --seed 0

The histogram of docs/published.md, in which every program goes through Dynamo too:

    python -m tests.programs.random_functions --kind mask --count 1000 --compile-every 1
    python -m tests.programs.random_functions --kind score --count 300 --compile-every 1
"""

import argparse
import collections
import contextlib
import functools
import linecache
import logging
import os
import random
import re
import sys
import time
import traceback
import types
import warnings
from dataclasses import dataclass, field

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import hypothesis.strategies as st
import torch
from torch.nn.attention import flex_attention as flex

import magi_compile
from magi_compile.masks.bits import FIRST_BITS

INTS = ("int8", "uint8", "int16", "int32", "int64")
FLOATS = ("float32", "float64")
PREAMBLE = """\
import functools, math, operator
import numpy as np
import torch
from torch.nn.attention.flex_attention import and_masks, or_masks
nan, inf = float("nan"), float("inf")
"""


class FromRandom:
    """Choices of a `random.Random`: fast, one number says which program."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def pick(self, options):
        return options[self.rng.randrange(len(options))]

    def integer(self, low, high):
        return self.rng.randint(low, high)

    def chance(self, percent):
        return self.rng.randrange(100) < percent


class FromHypothesis:
    """The same choices, drawn by hypothesis, which makes failing programs smaller."""

    def __init__(self, draw):
        self.draw = draw

    def pick(self, options):
        return options[self.draw(st.integers(0, len(options) - 1))]

    def integer(self, low, high):
        return self.draw(st.integers(low, high))

    def chance(self, percent):
        return self.draw(st.integers(0, 99)) >= 100 - percent


@dataclass
class Program:
    kind: str  # "mask" or "score"
    text: str
    sizes: dict = field(default_factory=dict)  # B, H, Q, K, D; HKV and dtype for scores

    def __str__(self):
        sizes = ", ".join(f"{name}={value!r}" for name, value in self.sizes.items())
        return f"{PREAMBLE}{self.text}# {self.kind}: {sizes}"


class Grammar:
    """Writes the text of one program. An expression is (text, kind), kind "b", "i" or "f"."""

    def __init__(self, choices):
        self.c = choices
        self.lines = []  # what stands in front: tensors and numbers
        self.tables = {}  # name -> (kind, shape name)
        self.numbers = {}  # name -> kind
        c = self.c
        self.B, self.H = c.integer(1, 2), c.integer(1, 2)
        self.Q = c.integer(1, 70)
        self.K = self.Q if c.chance(50) else c.integer(1, 70)
        self.N = max(self.Q, self.K)
        self.wild = c.pick(
            (0, 5, 20, 50)
        )  # how often something unusual stands where something usual could

    # -- data ---------------------------------------------------------------------------------------------------------

    def values(self, dtype, n):
        """n values of a 1-D table, in one of the patterns that users have, or of extreme ones."""
        c = self.c
        if dtype == "bool":
            how = c.integer(0, 3)
            if how == 0:
                cut = c.integer(0, n)
                return [i < cut for i in range(n)]
            if how == 1:
                cut = c.integer(0, n)
                return [i >= cut for i in range(n)]
            return [c.chance(50) for _ in range(n)]
        top = {
            "int8": 127,
            "uint8": 255,
            "int16": 2**15 - 1,
            "int32": 2**31 - 1,
            "int64": 2**63 - 1,
        }.get(dtype)
        low = 0 if dtype == "uint8" else (-top - 1 if top else None)
        how = c.pick(
            (
                "documents",
                "documents",
                "documents",
                "positions",
                "ends",
                "sorted",
                "small",
                "constant",
                "extreme",
            )
        )
        if how == "documents":
            out, doc = [], c.pick((0, 0, 0, 1))
            while len(out) < n:
                out += [doc] * c.integer(1, max(2, n // 2))
                doc += 1
            out = out[:n]
            if c.chance(25):
                tail = c.integer(0, n)
                out[n - tail :] = [-1 if dtype != "uint8" else 255] * tail
        elif how == "positions":
            out = []
            while len(out) < n:
                out += range(c.integer(1, max(2, n // 2)))
            out = out[:n]
        elif how == "ends":
            out = []
            while len(out) < n:
                length = c.integer(1, max(2, n // 2))
                out += [len(out) + length] * length
            out = out[:n]
        elif how == "sorted":
            out = sorted(c.integer(0, n) for _ in range(n))
        elif how == "small":
            out = [c.integer(0 if dtype == "uint8" else -2, 3) for _ in range(n)]
        elif how == "constant":
            out = [c.integer(0, 5)] * n
        elif top:
            out = [c.pick((low, top, 0, 1, top - 1, low + 1)) for _ in range(n)]
        else:
            out = [
                c.pick(("nan", "inf", "-inf", "-0.0", "0.0", "1.5", "1e30", "-2.5", "0.5"))
                for _ in range(n)
            ]
        if top:
            return [min(max(int(x), low), top) for x in out]
        return [x if isinstance(x, str) else float(x) for x in out]

    def table(self, shape, kind=None, dtype=None):
        """The name of a captured tensor: "seq" [N], "batch" [B], "batch_seq" [B, N], "seq2" [N, 2], "square" [N, N]."""
        c = self.c
        fitting = [
            n for n, (k, s) in self.tables.items() if s == shape and (kind is None or k == kind)
        ]
        if fitting and dtype is None and c.chance(60):
            return c.pick(fitting)
        kind = kind or c.pick("iiiiibbf")
        dtype = (
            dtype
            or {"b": "bool", "f": c.pick(FLOATS)}.get(kind)
            or c.pick((*INTS, "int32", "int64", "int64"))
        )
        name = f"t{len(self.tables)}"
        rows = {"seq": None, "batch": None, "batch_seq": self.B, "seq2": self.N, "square": self.N}[
            shape
        ]
        length = {"seq": self.N, "batch": self.B, "batch_seq": self.N, "seq2": 2, "square": self.N}[
            shape
        ]
        if rows is None:
            text = str(self.values(dtype, length))
        elif shape == "square":
            text = None
        else:
            text = str([self.values(dtype, length) for _ in range(rows)])
        if shape == "square":
            code = (
                f"(torch.arange({self.N * self.N}).view({self.N}, {self.N}) % 7).to(torch.{dtype})"
            )
        else:
            code = f"torch.tensor({text}, dtype=torch.{dtype})".replace("'", "")
        self.lines.append(f"{name} = {code}")
        self.tables[name] = (kind, shape)
        return name

    def number(self, kind):
        """A literal or a captured Python or numpy number, as text."""
        c = self.c
        if kind == "b":
            text = c.pick(("True", "False"))
        elif kind == "f":
            text = c.pick(
                (
                    "0.5",
                    "2.0",
                    "-1.5",
                    "0.0",
                    "-0.0",
                    "3.7",
                    "1e10",
                    "inf",
                    "nan",
                    "-inf",
                    "16777217.0",
                )
            )
        elif c.chance(85 - self.wild // 2):
            text = str(c.pick((0, 1, 2, 3, 4, 5, 7, 8, 16, -1, -3, 10, 30)))
        else:
            text = str(
                c.pick(
                    (
                        127,
                        128,
                        255,
                        256,
                        -128,
                        -129,
                        2**15,
                        2**31 - 1,
                        2**31,
                        -(2**31),
                        2**40,
                        2**63 - 1,
                        -(2**63),
                    )
                )
            )
        if c.chance(75):
            return f"({text})" if text.startswith("-") else text
        wrap = {
            "b": ("{}", "np.bool_({})"),
            "i": ("{}", "{}", "np.int64({})", "torch.tensor({})", "torch.tensor([{}])[0]"),
            "f": ("{}", "{}", "np.float64({})", "torch.tensor({})", "np.float32({})"),
        }[kind]
        text = c.pick(wrap).format(text)
        if c.chance(50):
            name = f"n{len(self.numbers)}"
            self.lines.append(f"{name} = {text}")
            self.numbers[name] = kind
            return name
        return text

    def positive(self):
        return str(self.c.pick((1, 2, 3, 4, 5, 7, 8, 16, 32)))

    # -- expressions of some of b, h, q, kv ---------------------------------------------------------------------------

    def viewed(self, name):
        """A 1-D tensor of N entries made from a captured one."""
        c = self.c
        kind = self.tables[name][0]
        if c.chance(75 - self.wild):
            return name, kind
        n = self.N
        same = (
            "{}.view(-1)", "{}.flip(0)", "torch.flip({}, [0])", "{}.roll(1)", "torch.roll({}, -2)", "{}.flatten()",
            "{}.reshape(-1)", "{}.expand(2, -1)[1]", "{}.unsqueeze(0).squeeze(0)", "{}[None][0]", "{}.contiguous()",
            "{}.clone()", "{}.sort().values", "torch.sort({})[0]", "torch.stack([{0}, {0}])[1]",
            "torch.cat([{0}, {0}])",
            "{}.repeat(2)", f"{{}}.index_select(0, torch.arange({n}))", f"{{}}[:{n}]", "{}[...]", "{}.detach()",
            "{}.cummax(0).values", "torch.cummax({}, 0)[0]", "{}.cummin(0)[0]", f"{{}}.view(1, {n}).T[:, 0]",
            f"{{}}.view({n}, 1).t()[0, :]", "{}.repeat_interleave(2)", "{}.unsqueeze(1)[:, 0]",
            "torch.atleast_2d({})[0]",
            "{}.movedim(0, 0)", "{}.to(torch.int64).to(torch.int8)", "torch.where({0} == {0}, {0}, {0})",
        )  # fmt: skip
        as_int = (
            "{}.cumsum(0)", "torch.cumsum({}, 0)", "torch.cumsum({}, dim=0, dtype=torch.int32)",
            "{}.argsort(stable=True)",
            "{}.long()", "{}.int()", "({}.long() + 1)", "{}.long().clamp(0, 3)", "(-{}.long())",
            "({} != {}.roll(1)).cumsum(0)",
            "torch.diff({}.long(), prepend=torch.zeros(1, dtype=torch.int64))", "({} > 0).long()", "{}.to(torch.int8)",
            "({}.long() * 2)", "({}.long() - {}.long().min())",
            f"torch.bincount({{}}.long().clamp(0, {n}), minlength={n})",
            "torch.nn.functional.pad({}, (1, 0))", "({}.long() // 2)",
        )  # fmt: skip
        as_float = ("{}.float()", "{}.double()", "({} * 0.5)", "{}.float().cumsum(0)", "({} / 2)")
        as_bool = (
            "({} > 0)",
            "{}.bool()",
            "({} != 0)",
            "{}.ne({})",
            "torch.isin({}, torch.tensor([1, 2]))",
        )
        how, templates = c.pick(
            (("=", same), ("=", same), ("i", as_int), ("f", as_float), ("b", as_bool))
        )
        template = c.pick(templates)
        text = (
            template.format(*[name] * template.count("{}"))
            if "{}" in template
            else template.format(name)
        )
        return text, kind if how == "=" else how

    def index(self, var):
        """An index of a sequence table, in range for any q or kv."""
        c = self.c
        n = self.N
        if c.chance(80 - self.wild):
            return var
        other = c.pick((var, var, "q", "kv"))
        options = (
            f"{var} // 2", f"{var} - 1", f"-{var} - 1", f"({var} + {c.integer(1, 9)}) % {n}", f"({var} * 3) % {n}",
            f"torch.clamp({var} - {c.integer(0, 9)}, 0)", f"({var} + 1).clamp(max={n - 1})", f"{var} - {n}", f"~{var}",
            f"torch.minimum({var}, torch.tensor({n - 1}))", f"{var}.clamp(min=1) - 1", f"{var} % 3 % {n}",
            f"torch.where({var} > 3, {var}, 0)", f"{var} >> 1", f"{var} & 0", c.pick(("0", "-1")), f"{var}.int()",
            f"torch.where({other} > 0, {var}, 0)", f"({var} / 2).long()", f"{n - 1} - {var}",
            f"torch.maximum({var} - 2, b)",
        )  # fmt: skip
        if c.chance(15):
            name = f"t{len(self.tables)}"
            values = (
                [c.integer(-n, n - 1) for _ in range(n)]
                if c.chance(30)
                else [c.integer(0, n - 1) for _ in range(n)]
            )
            dtype = c.pick(("int64", "int64", "int32", "int16", "uint8"))
            self.lines.append(f"{name} = torch.tensor({values}, dtype=torch.{dtype})")
            self.tables[name] = ("i", "seq")
            return f"{name}[{var}]"
        return c.pick(options)

    def look_up(self, variables, kind=None):
        c = self.c
        var = c.pick(variables)
        if var in "bh":
            if var == "h" and self.H > self.B:
                return self.row_of(variables, kind)
            name = self.table("batch", kind)
            return f"{name}[{var}]", self.tables[name][0]
        shape = c.pick(
            ("seq", "seq", "seq", "batch_seq", "seq2", "square" if self.wild > 5 else "seq")
        )
        name = self.table(shape, kind)
        kind = self.tables[name][0]
        i = self.index(var)
        if shape == "seq":
            text, kind = self.viewed(name)
            return f"{text}[{i}]", kind
        if shape == "batch_seq":
            return c.pick(("{0}[b, {1}]", "{0}[b, {1}]", "{0}[b][{1}]", "{0}[0, {1}]", "{0}[0][{1}]", "{0}[-1, :][{1}]",
                           "{0}.t()[{1}, b]", "{0}.T[{1}][b]", f"{{0}}.flatten()[b * {self.N} + {{1}}]",
                           "{0}.sum(0)[{1}]", "{0}.view(-1)[{1}]", "{0}[:, {1}][b]",
                           "{0}.squeeze()[{1}]")).format(name, i), kind  # fmt: skip
        if shape == "seq2":
            return c.pick(("{0}[{1}, 0]", "{0}[:, 1][{1}]", "{0}[{1}][1]", "{0}.T[0, {1}]", "{0}[{1}].sum()",
                           "{0}.select(1, 0)[{1}]", "{0}.unbind(1)[1][{1}]", "{0}[..., 0][{1}]", "{0}[{1}, -1]",
                           "{0}.flatten()[{1} * 2]", "{0}[{1}].max()", "{0}.sum(1)[{1}]",
                           "{0}[{1}, b % 2]")).format(name, i), kind  # fmt: skip
        return (
            f"{name}[{i}, {self.index(c.pick(variables) if c.chance(50) else var) if var not in 'bh' else '0'}]",
            kind,
        )

    def row_of(self, variables, kind=None):
        return self.c.pick(variables), "i"

    def leaf(self, variables):
        c = self.c
        roll = c.integer(0, 99)
        if roll < 45:
            return c.pick(variables), "i"
        if roll < 90:
            return self.look_up(variables)
        kind = c.pick("iiibf")
        return self.number(kind), kind

    def unary(self, x, kind):
        c = self.c
        n, m = self.number("i"), self.positive()
        both = [
            ("(-{x})", "="), ("{x}.abs()", "="), ("abs({x})", "="), ("torch.sign({x})", "="), ("({x} + {n})", "="),
            ("({n} - {x})", "="), ("({x} * {n})", "="), ("{x}.clamp({m}, 20)", "="), ("torch.clamp({x}, min={n})", "="),
            ("{x}.clamp(max={m})", "="), ("torch.clip({x}, 1, {m})", "="), ("({x} ** 2)", "="), ("{x}.pow(2)", "="),
            ("torch.square({x})", "="),
            ("({x} // {m})", "="), ("({x} % {m})", "="), ("torch.remainder({x}, {m})", "="),
            ("torch.fmod({x}, {m})", "="),
            ("({x} % -{m})", "="), ("({x} // -{m})", "="), ('torch.div({x}, {m}, rounding_mode="trunc")', "="),
            ('torch.div({x}, {m}, rounding_mode="floor")', "="), ("torch.floor_divide({x}, {m})", "="),
            ("torch.floor({x})", "="),
            ("{x}.ceil()", "="), ("torch.round({x})", "="), ("torch.trunc({x})", "="),
            ("torch.add({x}, {n}, alpha=2)", "="),
            ("torch.sub({x}, {n})", "="), ("torch.maximum({x}, torch.tensor({m}))", "="), ("torch.neg({x})", "="),
            ("+{x}", "="), ("{x}.clone()", "="), ("torch.full_like({x}, 3)", "="), ("torch.zeros_like({x})", "="),
            ("torch.where({x} > {m}, {x}, {n})", "="), ("torch.where({x} > {m}, {n}, {x})", "="),
            ("{x}.masked_fill({x} > {m}, {m})", "="),
            ("({x} / {m})", "f"), ("torch.true_divide({x}, {m})", "f"), ("({x} * 0.5)", "f"), ("({x} + 0.5)", "f"),
            ("{x}.float()", "f"), ("{x}.double()", "f"), ("{x}.to(torch.float32)", "f"), ("{x}.half()", "f"),
            ("{x}.bfloat16()", "f"),
            ("{x}.long()", "i"), ("{x}.int()", "i"), ("{x}.to(torch.int8)", "i"), ("{x}.to(torch.uint8)", "i"),
            ("{x}.short()", "i"),
            ("{x}.type(torch.int32)", "i"), ("{x}.bool()", "b"), ("torch.logical_not({x})", "b"), ("({x} > {n})", "b"),
            ("({x} == {n})", "b"), ("torch.isin({x}, torch.tensor([1, 2, 5]))", "b"), ("({x} ** 0.5)", "f"),
            ("torch.sqrt({x})", "f"),
            ("torch.isnan({x})", "b"), ("torch.signbit({x})", "b"), ("torch.nan_to_num({x})", "="), ("{x}.sgn()", "="),
            ("torch.exp({x})", "f"), ("torch.log2({x})", "f"), ("torch.tanh({x})", "f"), ("{x}.relu()", "="),
            ("torch.rsub({x}, {n})", "="), ("{x}.unsqueeze(0)[0]", "="), ("{x}.view(1).squeeze()", "="),
            ("{x}.sum()", "="), ("{x}.max()", "="),
            ("{x}.type_as(torch.tensor(1, dtype=torch.int16))", "i"),
            ("torch.clamp({x}, torch.tensor({n}), torch.tensor(20))", "="),
            ("({m} ** {x})", "="), ("{x}.new_full((), {m})", "="), ("{x}.frac()", "="), ("torch.reciprocal({x})", "f"),
        ]  # fmt: skip
        integral = [
            ("(~{x})", "="), ("({x} << 1)", "="), ("({x} >> 1)", "="), ("({x} & {m})", "="), ("({x} | {m})", "="),
            ("({x} ^ {m})", "="), ("torch.bitwise_and({x}, {n})", "="), ("torch.bitwise_left_shift({x}, {m})", "="),
            ("({x} >> {m})", "="), ("({x} << {m})", "="), ("torch.gcd({x}, torch.tensor({m}))", "="),
            ("(1 << {x})", "="),
        ]  # fmt: skip
        boolean = [("(~{x})", "="), ("({x} * {n})", "i"), ("({x} + {x})", "="), ("({x} | {x})", "="),
                   ("torch.logical_not({x})", "b"),
                   ("torch.where({x}, {n}, {m})", "i"), ("({x} == False)", "b"), ("{x}.long()", "i"),
                   ("({x} ^ True)", "b"),
                   ("({x} + 1)", "i"), ("({x} >= 1)", "b"), ("{x}.float()", "f"), ("({x} != 0)", "b")]  # fmt: skip
        if kind == "b" and c.chance(90):
            options = boolean
        elif kind == "i":
            options = both + integral
        else:
            options = both
        template, result = c.pick(options)
        return template.replace("{x}", x).replace("{n}", n).replace(
            "{m}", m
        ), kind if result == "=" else result

    def binary(self, x, y):
        c = self.c
        (x, kx), (y, ky) = x, y
        kind = max(kx, ky, key="bif".index)
        if kind == "b":
            template, result = c.pick((("({x} & {y})", "b"), ("({x} | {y})", "b"), ("({x} ^ {y})", "b"), ("({x} == {y})", "b"),
                                       ("({x} * {y})", "b"), ("({x} + {y})", "b"), ("({x} > {y})", "b"),
                                       ("torch.logical_xor({x}, {y})", "b")))  # fmt: skip
            return template.replace("{x}", x).replace("{y}", y), result
        options = [
            ("({x} + {y})", "="), ("({x} - {y})", "="), ("({x} - {y})", "="), ("({x} + {y})", "="),
            ("({x} * {y})", "="),
            ("torch.minimum({x}, {y})", "="), ("torch.maximum({x}, {y})", "="),
            ("torch.where({x} > {y}, {x}, {y})", "="),
            ("({x} // ({y}.abs() + 1))", "="), ("({x} % ({y}.abs() + 1))", "="), ("torch.add({x}, {y}, alpha=2)", "="),
            ("({x} / {y})", "f"), ("torch.fmod({x}, {y}.abs() + 1)", "="), ("torch.sub({x}, {y}, alpha=3)", "="),
            ("({x} > {y})", "b"), ("torch.max({x}, {y})", "="),
            ("torch.stack([{x}, {y}]).max()", "="), ("torch.stack([{x}, {y}]).sum()", "="), ("({x} ** {y})", "="),
            ("torch.where({x} > 1, {y}, {x})", "="),
        ]  # fmt: skip
        if kind == "i":
            options += [
                ("({x} & {y})", "i"),
                ("({x} | {y})", "i"),
                ("({x} ^ {y})", "i"),
                ("({x} << ({y} & 7))", "i"),
                ("({x} >> ({y} & 7))", "i"),
            ]
        template, result = c.pick(options)
        return template.replace("{x}", x).replace("{y}", y), kind if result == "=" else result

    def expression(self, variables, depth):
        c = self.c
        roll = c.integer(0, 99)
        if depth <= 0 or roll < 45 - self.wild // 2:
            return self.leaf(variables)
        if roll < 75:
            x, kind = self.expression(variables, depth - 1)
            if not re.search(r"\b(b|h|q|kv|t\d+)\b", x):
                x, kind = c.pick(variables), "i"
            return self.unary(x, kind)
        return self.binary(
            self.expression(variables, depth - 1), self.expression(variables, depth - 1)
        )

    def variables_of(self, side):
        return self.c.pick(
            (side, side, side, (*side, "b"), (*side, "b", "h") if self.wild > 20 else side)
        )

    # -- conditions ---------------------------------------------------------------------------------------------------

    def compare(self, x, y, op=None):
        c = self.c
        op = op or c.pick((">=", "<=", "<", ">", "==", "==", "!="))
        if c.chance(90):
            return f"({x} {op} {y})"
        name = {">=": "ge", "<=": "le", "<": "lt", ">": "gt", "==": "eq", "!=": "ne"}[op]
        return c.pick((f"torch.{name}({x}, {y})", f"{x}.{name}({y})", f"operator.{name}({x}, {y})"))

    def atom(self):
        """A condition of one of the kinds that users write, at times with something unusual in it."""
        c = self.c
        depth = 0 if c.chance(60 - self.wild) else c.integer(1, 3)
        how = c.pick(("causal", "window", "document", "document", "block", "length", "prefix", "table", "row", "sink",
                      "mixed",
                      "key", "offsets", "affine", "unusual"))  # fmt: skip
        if how == "causal":
            return self.compare("q", "kv", c.pick((">=", ">=", "<=", ">")))
        if how == "window":
            w = (
                self.number("i")
                if c.chance(70)
                else self.expression(self.variables_of(("q",)), depth)[0]
            )
            return c.pick(("(q - kv < {})", "((q - kv).abs() <= {})", "(torch.abs(kv - q) < {})", "(kv >= q - {})",
                           "(q < kv + {})",
                           "((q - kv) % {} == 0)", "(abs(q - kv) > {})", "(kv + {} - q > 0)",
                           "(torch.clamp(q - kv, min=0) < {})",
                           "((q - kv) ** 2 <= {})", "(torch.square(q - kv) < {})", "((q - kv) / 4 < {})",
                           "((q - kv) // 4 <= {})",
                           "((q - kv).float() <= {})", "(torch.maximum(q, kv) < {})",
                           "(-{} <= kv - q)")).format(w)  # fmt: skip
        if how == "document":
            shape = c.pick(("seq", "seq", "batch_seq"))
            name = self.table(shape, None if c.chance(30) else "i")
            if shape == "seq":
                text, _ = self.viewed(name)
                left = right = text
            else:
                left = right = f"{name}[b]" if c.chance(50) else f"{name}[b, :]"
            i, j = ("q", "kv") if depth == 0 else (self.index("q"), self.index("kv"))
            x, y = f"{left}[{i}]", f"{right}[{j}]"
            if c.chance(10):
                y, x = x, y
            if c.chance(15 + self.wild):
                x, _ = self.unary(x, self.tables[name][0])
                if c.chance(50):
                    y = x.replace("q", "kv") if "sq" not in x and "eq" not in x else y
            return self.compare(x, y, c.pick(("==", "==", "==", "!=", "<=", ">=")))
        if how == "block":
            n, m = self.positive(), self.positive()
            return c.pick(("(q // {n} {o} kv // {m})", "(q // {n} * {n} {o} kv)", "((kv // {n}) * {m} {o} q)",
                           "(q % {n} {o} kv % {n})",
                           "(kv % {n} == 0)", "(kv % {n} < q % {n})", "(q >> 2 {o} kv >> 2)", "((q ^ kv) < {n})",
                           "((q // {n}) % 2 {o} (kv // {n}) % 2)",
                           "(torch.div(q, {n}, rounding_mode='floor') {o} torch.div(kv, {n}, rounding_mode='floor'))",
                           "((q / {n}).floor() {o} kv)",
                           "((q / {n}).int() {o} (kv / {n}).int())", "((q & 4) {o} (kv & 4))", "((q | 3) {o} kv)",
                           "(kv & {n} == 0)")
                          ).replace("{n}", n).replace("{m}", m).replace("{o}",
                                                                        c.pick((">=", "==", "<=", "!=", "<",
                                                                                ">")))  # fmt: skip
        if how == "length":
            x, _ = self.look_up(("b",))
            return self.compare(c.pick(("kv", "q", "kv", "kv + 1")), x, c.pick(("<", "<=", ">=")))
        if how == "prefix":
            return self.compare("kv", self.expression(self.variables_of(("q",)), depth)[0])
        if how == "table":
            x, kind = self.look_up(self.variables_of(c.pick((("q",), ("kv",)))))
            if kind == "b":
                return x
            return c.pick(
                (
                    f"({x} > 0)",
                    f"({x} != 0)",
                    f"{x}.bool()",
                    f"({x} == {self.number('i')})",
                    f"torch.isin({x}, torch.tensor([0, 1]))",
                )
            )
        if how in ("row", "key"):
            x, kind = self.expression(
                self.variables_of(("q",) if how == "row" else ("kv",)), depth + 1
            )
            if kind == "b" and c.chance(70):
                return x
            return self.compare(x, self.number(c.pick("iiif")))
        if how == "sink":
            return self.compare("kv", self.number("i"), c.pick(("<", "<=")))
        if how == "mixed":
            x, _ = self.expression(self.variables_of(("q",)), depth)
            y, _ = self.expression(self.variables_of(("kv",)), depth)
            return self.compare(x, y)
        if how == "offsets":
            cuts = sorted({0, *(c.integer(0, self.N) for _ in range(c.integer(0, 4)))})
            dtype = c.pick(("int64", "int32"))
            name = f"t{len(self.tables)}"
            self.lines.append(f"{name} = torch.tensor({cuts}, dtype=torch.{dtype})")
            self.tables[name] = ("i", "offsets")
            part = c.pick(("({n} <= {v}).sum()", "torch.searchsorted({n}, {v}, right=True)",
                           "torch.bucketize({v}, {n})",
                           "({v} >= {n}).sum(-1)", "({n} > {v}).int().argmax()", "torch.count_nonzero({n} <= {v})",
                           "({n} <= {v}).long().sum(0)"))  # fmt: skip
            return self.compare(
                part.format(n=name, v="q"), part.format(n=name, v="kv"), c.pick(("==", ">=", "<="))
            )
        if how == "affine":
            x = f"{c.pick(('q', 'q', '2 * q', 'q * 3', '-q'))} {c.pick('+-')} {self.number('i')}"
            y = f"{c.pick(('kv', 'kv', '2 * kv', 'kv * 3', '-kv', 'kv + b'))} {c.pick('+-')} {self.number('i')}"
            return self.compare(x, y)
        x, kind = self.expression(("q", "kv"), depth + 1)
        return x if kind == "b" else self.compare(x, self.number(c.pick(("i", "i", "f"))))

    def condition(self, depth):
        c = self.c
        roll = c.integer(0, 99)
        if depth <= 0 or roll < 20:
            return self.atom()
        if roll < 85:
            x, y = self.condition(depth - 1), self.condition(depth - 1)
            if c.chance(80):
                return c.pick(
                    (
                        f"({x} & {y})",
                        f"({x} & {y})",
                        f"({x} | {y})",
                        f"({x} ^ {y})" if self.wild else f"({x} | {y})",
                    )
                )
            return c.pick((f"torch.logical_and({x}, {y})", f"torch.logical_or({x}, {y})",
                           f"torch.logical_xor({x}, {y})", f"({x} * {y})",
                           f"({x} == {y})", f"({x} != {y})", f"({x} <= {y})", f"({x} + {y})", f"{x}.logical_and({y})",
                           f"torch.bitwise_or({x}, {y})",
                           f"({x} > {y})", f"torch.minimum({x}, {y})", f"torch.stack([{x}, {y}]).any()",
                           f"torch.all(torch.stack([{x}, {y}]))"))  # fmt: skip
        if roll < 93:
            return c.pick(
                (
                    f"(~{self.condition(depth - 1)})",
                    f"torch.logical_not({self.condition(depth - 1)})",
                )
            )
        return f"torch.where({self.condition(depth - 1)}, {self.condition(depth - 1)}, {self.condition(depth - 1)})"

    # -- functions ----------------------------------------------------------------------------------------------------

    def body(self, depth):
        """Statements that end in a return."""
        c = self.c
        how = c.integer(0, 11)
        if how == 0:
            op = c.pick(("&=", "|=", "^="))
            return [
                f"mask = {self.condition(depth - 1)}",
                f"mask {op} {self.condition(depth - 1)}",
                "return mask",
            ]
        if how == 1:
            return [
                f"mask = {self.condition(depth - 1)}",
                f"for w in (2, 5):\n        mask = mask {c.pick('&|')} (q {c.pick('-+')} kv {c.pick('<>')} w)",
                "return mask",
            ]
        if how == 2:
            flag = c.pick(("True", "False", "0", "1"))
            self.lines.append(f"flag = {flag}")
            return [
                f"mask = {self.condition(depth - 1)}",
                f"if flag:\n        return mask & {self.atom()}",
                "return mask",
            ]
        if how == 3:
            x, _ = self.expression(("q",), 1)
            return [
                f"x = {x}",
                f"y = {x.replace('q', 'kv') if 'sq' not in x and 'eq' not in x else 'kv'}",
                f"return {self.compare('x', 'y')} & {self.condition(depth - 1)}",
            ]
        if how == 4:
            return [f"def inner(q, kv):\n        return {self.atom()}",
                    f"return inner(q, kv) {c.pick('&|')} {c.pick(('inner(kv, q)', 'inner(q + 1, kv)', '~inner(q, kv - 1)', self.atom()))}"]  # fmt: skip
        if how == 5 and self.wild:
            return [f"x = {self.expression(('q',), 1)[0]}", f"x {c.pick(('+=', '-=', '*=', '//=', '%='))} {c.pick((self.positive(), 'q'))}",
                    f"return {self.compare('x', self.expression(('kv',), 1)[0])} {c.pick('&|')} {self.condition(depth - 1)}"]  # fmt: skip
        if how == 6:
            return [
                f"conditions = [{self.atom()}, {self.atom()}, {self.atom()}]",
                f"return functools.reduce(operator.{c.pick(('and_', 'or_', 'xor'))}, conditions)",
            ]
        return [f"return {self.condition(depth)}"]

    def function(self, name, depth):
        """The definition of a mask_mod in one of the ways in which functions hold their tensors."""
        c = self.c
        body = self.body(depth)
        used = sorted({t for line in body for t in re.findall(r"\b[tn]\d+\b", line)})
        style = c.pick(
            (
                "global",
                "global",
                "closure",
                "default",
                "partial",
                "object",
                "lambda",
                "partial_keywords",
                "dict",
            )
        )
        if style == "lambda" and len(body) == 1:
            return [f"{name} = lambda b, h, q, kv: {body[0].removeprefix('return ')}"]
        if style == "closure" and used:
            inner = "\n".join("        " + line.replace("\n", "\n    ") for line in body)
            args = ", ".join(used)
            return [
                f"def make_{name}({args}):\n    def {name}(b, h, q, kv):\n{inner}\n    return {name}",
                f"{name} = make_{name}({args})",
            ]
        lines = "\n".join("    " + line for line in body)
        if style == "default" and used:
            args = ", ".join(f"{t}={t}" for t in used)
            return [f"def {name}(b, h, q, kv, {args}):\n{lines}"]
        if style == "partial" and used:
            return [
                f"def full_{name}({', '.join(used)}, b, h, q, kv):\n{lines}",
                f"{name} = functools.partial(full_{name}, {', '.join(used)})",
            ]
        if style == "partial_keywords" and used:
            args = ", ".join(f"{t}={t}" for t in used)
            return [
                f"def full_{name}(b, h, q, kv, {', '.join(used)}):\n{lines}",
                f"{name} = functools.partial(full_{name}, {args})",
            ]
        if style in ("object", "module") and used:
            inner = "\n".join("        " + line.replace("\n", "\n    ") for line in body)
            inner = re.sub(r"\b([tn]\d+)\b", r"self.\1", inner)
            base, call, init = (
                ("(torch.nn.Module)", "forward", "super().__init__(); ")
                if style == "module"
                else ("", "__call__", "")
            )
            sets = "; ".join(f"self.{t} = {t}" for t in used)
            return [
                f"class Class_{name}{base}:\n    def __init__(self):\n        {init}{sets}\n    def {call}(self, b, h, q, kv):\n{inner}",
                f"{name} = Class_{name}()",
            ]
        if style == "dict" and used:
            lines = re.sub(r"\b([tn]\d+)\b", rf"{name}_data['\1']", lines)
            return [
                f"{name}_data = dict({', '.join(f'{t}={t}' for t in used)})",
                f"def {name}(b, h, q, kv):\n{lines}",
            ]
        return [f"def {name}(b, h, q, kv):\n{lines}"]

    def mask_program(self):
        c = self.c
        depth = c.integer(0, 3)
        if c.chance(15):
            count = c.integer(2, 3)
            defs = [
                line for i in range(count) for line in self.function(f"mask_{i}", max(0, depth - 1))
            ]
            args = ", ".join(f"mask_{i}" for i in range(count))
            defs.append(f"mask_mod = {c.pick(('and_masks', 'or_masks'))}({args})")
        else:
            defs = self.function("mask_mod", depth)
        text = "\n".join([*self.lines, *defs]) + "\n"
        sizes = {"B": self.B, "H": self.H, "Q": self.Q, "K": self.K, "D": c.pick((8, 16))}
        return Program("mask", text, sizes)

    # -- score_mods ---------------------------------------------------------------------------------------------------

    def score(self, x, depth):
        c = self.c
        f, i = self.number("f"), self.number("i")
        n = c.pick((f, i, "0.125", "2", "-1", "0.5", "20.0", "30", "-0.25", "1", "0"))
        cap = c.pick(("2.0", "20", "5.0", "-3.0", "0.5", "50.0", n))
        usual = (
            f"({x} * {n})", f"({n} * {x})", f"({x} / {c.pick((n, '2', '4.0', '-8'))})",
            f"({cap} * torch.tanh({x} / {cap}))", f"(torch.tanh({x} / {cap}) * {cap})",
            f"({x} / {cap}).tanh() * {cap}", f"(-{x})", f"torch.neg({x})", f"torch.mul({x}, {n})",
            f"torch.div({x}, {cap})", f"({x} * 1)",
            f"torch.tanh({x})", f"(torch.tanh({x} * 0.5) * 2)", f"{x}.mul({n})", f"({x} + 0)", f"(math.sqrt(8) * {x})",
        )  # fmt: skip
        tab = self.table("batch", dtype=None)
        unusual = (
            f"({x} + {n})", f"({n} - {x})", f"({x} * 2 // 3)", f"({x} + q - kv)", f"({x} - (q - kv))",
            f"({x} + q * 0.5)", f"({x} * (q >= kv))",
            f"torch.where(q >= kv, {x}, -inf)", f"torch.where(q >= kv, {x}, {n})", f"torch.where({x} > 0, {x}, {n})",
            f"{x}.abs()", f"{x}.clamp(-2, 2)",
            f"torch.clamp({x}, max={n})", f"{x}.relu()", f"({x} ** 2)", f"({x} ** 1)", f"{x}.to(torch.bfloat16)",
            f"{x}.half()", f"{x}.double()",
            f"{x}.float()", f"({x} + {x})", f"({x} * {x})", f"({x} - {x})", f"({x} / {x})", f"torch.exp({x})",
            f"torch.sigmoid({x})", f"torch.add({x}, {n}, alpha=2)",
            f"torch.sub({x}, {x}, alpha=3)", f"torch.add({x}, {x}, alpha=2)", f"torch.rsub({x}, {n})",
            f'torch.div({x}, 2, rounding_mode="floor")', f"({x} % 3)",
            f"({x} + h)", f"({x} * (h + 1))", f"({x} * (b + 1))", f"({x} * {tab}[b])", f"({x} + {tab}[b])",
            f"({x} * torch.tensor({n}))", f"torch.maximum({x}, torch.tensor({n}))",
            f"{x}.detach()", f"{x}.clone()", f"{x}.contiguous()", f"torch.nn.functional.softplus({x})",
            f"torch.nn.functional.hardtanh({x})", f"torch.nan_to_num({x})",
            f"({x} - 0.1 * (q - kv).abs())", f"torch.round({x})", f"{x}.int()", f"({x} > 0)",
            f"torch.lerp({x}, {x}, 0.5)", f"{x}.masked_fill(q < kv, -inf)",
            f"torch.where({x} == {x}, {x}, 0)", f"torch.pow({x}, 3)", f"{x}.sin()", f"torch.zeros_like({x})",
            f"({x} * 0.5 + {x} * 0.5)", f"{x}.square()",
            f"(1 / {x})", f"({n} / {x})", f"torch.sign({x})", f"torch.addcmul({x}, {x}, {x})", f"({x} * True)",
            f"({x} * torch.tensor([{n}])[0])", f"torch.atan({x})",
            f"({x} * np.float32(0.5))", f"{x}.type(torch.float32)", f"({x} if {cap} else -{x})",
            f"torch.true_divide({x}, {cap})", f"({x} * torch.ones(()))",
            f"({x} * torch.tensor(0.5, dtype=torch.float64))", f"({x} * 1e30)", f"({x} * 1e-30)",
            f"(torch.tanh({x} / {cap}) * -{cap})", f"(torch.tanh({x} / {cap}) * 3.0)",
        )  # fmt: skip
        text = c.pick(usual if c.chance(65 - self.wild // 2) else unusual)
        return self.score(text, depth - 1) if depth > 0 else text

    def score_program(self):
        c = self.c
        how = c.integer(0, 9)
        text = self.score("score", c.integer(0, 3))
        if how == 0:
            body = [
                f"score {c.pick(('*=', '/=', '+=', '-='))} {c.pick(('2', '0.5', '-1', 'h', 'q - kv'))}",
                f"return {text}",
            ]
        elif how == 1:
            body = [f"score = {text}", f"score = {self.score('score', 0)}", "return score"]
        else:
            body = [f"return {text}"]
        used = sorted({t for line in body for t in re.findall(r"\b[tn]\d+\b", line)})
        inner = "\n".join("    " + line for line in body)
        style = c.pick(("global", "global", "closure", "partial"))
        if style == "closure" and used:
            args, indented = ", ".join(used), inner.replace("    ", "        ")
            defs = [
                f"def make({args}):\n    def score_mod(score, b, h, q, kv):\n{indented}\n    return score_mod",
                f"score_mod = make({args})",
            ]
        elif style == "partial" and used:
            defs = [
                f"def full(score, b, h, q, kv, {', '.join(used)}):\n{inner}",
                f"score_mod = functools.partial(full, {', '.join(f'{t}={t}' for t in used)})",
            ]
        else:
            defs = [f"def score_mod(score, b, h, q, kv):\n{inner}"]
        if c.chance(40):
            causal = c.chance(60)
            defs.append(
                f"def mask_mod(b, h, q, kv):\n    return {'q >= kv' if causal else 'kv < 5'}"
            )
        sizes = {"B": self.B, "H": self.H, "Q": self.Q, "K": self.K, "D": 16,
                 "dtype": c.pick(("float32", "float32", "bfloat16", "float16")),
                 "scale": c.pick((None, None, 1.0, 0.5, -0.5, 0.0))}  # fmt: skip
        return Program("score", "\n".join([*self.lines, *defs]) + "\n", sizes)


def program_of(kind, choices):
    grammar = Grammar(choices)
    return grammar.mask_program() if kind == "mask" else grammar.score_program()


@st.composite
def programs(draw, kind="mask"):
    return program_of(kind, FromHypothesis(draw))


# -- what becomes of them ---------------------------------------------------------------------------------------------


class Skip(Exception):
    """PyTorch raises for this program itself."""


@dataclass
class Verdict:
    route: str
    outcome: str  # equal, refused, data error, WRONG, "WRONG, SEEN" by the checks of the package itself, RAISES
    detail: str = ""  # what is wrong, or why it is refused; of what is equal, which way it took

    @property
    def fails(self):
        return self.outcome in ("WRONG", "WRONG, SEEN", "RAISES", "data error")


_count = 0


def load(program):
    """The program's names, as a module whose source tracebacks and Dynamo can read."""
    global _count
    _count += 1
    name = f"random_program_{_count}"
    source = PREAMBLE + program.text
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(source, filename, "exec"), module.__dict__)
    finally:
        module.unload = lambda: (sys.modules.pop(name, None), linecache.cache.pop(filename, None))
    return module


def one_line(error):
    text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def where(error):
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "magi_compile" in f.filename]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].name}" if frames else "?"


def reason(text):
    """A reason without the names and numbers in it, for the histogram."""
    text = re.sub(r"^.*?representable yet: ", "", text)
    text = re.sub(r"`[^`]*`", "`_`", text)
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)", "", text)
    return re.sub(r"-?\d+", "N", text)[:110]


def refusal(error):
    """Whether an exception says that the mask or the score_mod stays on FlexAttention."""
    text = str(error)
    return (
        isinstance(error, NotImplementedError)
        or "LoweringRefusedError" in f"{type(error).__name__} {text}"
    )


def judge(route, run, check):
    """Runs one route: `check` gets its result and says what is wrong with it, or None."""
    try:
        result = run()
    except Exception as error:
        if isinstance(error, magi_compile.MaskDataError) or "MaskDataError" in str(error):
            own = "bug of ours" in str(error)
            return Verdict(route, "WRONG, SEEN" if own else "data error", one_line(error))
        if refusal(error):
            return Verdict(route, "refused", one_line(error))
        if isinstance(error, SystemError) or "The shape of the mask" in str(error):
            # A uint8 index is a mask for PyTorch: what it selects, and whether it warns, depends on all shapes around
            # it.
            return Verdict(route, "uint8 index", one_line(error))
        stock = ("Dynamo failed to run FX node", "InductorError", "all unwrapped values must be")
        text = f"{type(error).__name__}: {error}"
        if type(error).__name__ == "Unsupported" or any(name in text for name in stock):
            return Verdict(route, "torch.compile raises", one_line(error))
        return Verdict(route, "RAISES", f"{one_line(error)} at {where(error)}")
    wrong = check(result)
    return Verdict(route, "WRONG", wrong) if wrong else Verdict(route, "equal")


def dense(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(group, 1),
        v.double().repeat_interleave(group, 1),
    )
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num() @ v


def difference(got, want, tolerance=2e-5):
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=False):
        if x.shape != y.shape:
            return f"{name} has shape {list(x.shape)}, not {list(y.shape)}"
        x, y = x.double(), y.double()
        if not torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
            rows = (~torch.isclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)).nonzero()
            return (
                f"{name} differs in {len(rows)} of {x.numel()} places, first at {rows[0].tolist()}"
            )
    return None


def same_lists(got, want):
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        x, y = getattr(got, name), getattr(want, name)
        if (x is None) != (y is None):
            return f"{name} is {'None' if x is None else 'a tensor'}"
        if x is not None and (x.dtype != y.dtype or not torch.equal(x, y)):
            return f"{name} is {x.tolist()}, PyTorch's is {y.tolist()}"
        if x is not None:
            x, y = (getattr(m, name.replace("num_blocks", "indices")) for m in (got, want))
            if x.dtype != y.dtype or not torch.equal(x, y):
                return f"{name.replace('num_blocks', 'indices')} differ"
    if not torch.equal(got.to_dense(), want.to_dense()):
        return "to_dense() differs"
    if (
        got.seq_lengths != want.seq_lengths
        or got.BLOCK_SIZE != want.BLOCK_SIZE
        or got.shape != want.shape
    ):
        return f"shape {got.shape} of blocks {got.BLOCK_SIZE}, PyTorch's {want.shape} of {want.BLOCK_SIZE}"
    return None


def run_with_gradients(f, q, k, v, dout):
    inputs = [x.detach().clone().requires_grad_(dout is not None) for x in (q, k, v)]
    with torch.set_grad_enabled(dout is not None):
        out = f(*inputs)
    if dout is None:
        return (out.detach(),)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype)))


@contextlib.contextmanager
def quiet():
    logger = logging.getLogger("magi_compile")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


def compiled(f, inner="eager"):
    torch._dynamo.reset()
    return torch.compile(f, backend=magi_compile.make_backend(inner=inner))


def way(attend, q, k, v):
    """Which way the mask of this function's one attention takes: by intervals or by bit blocks."""
    (call,) = magi_compile.explain(attend, q, k, v).calls
    has_bits = call.slices.mask_types.numel() and int(call.slices.mask_types.max()) >= FIRST_BITS
    always = any(note.startswith("by bit blocks") for note in call.decision.notes)
    return "by bit blocks" if has_bits or always else "by intervals"


def check_mask(program, routes=("lists", "eager"), gradients=False, inner="eager"):
    """The verdicts of one mask_mod; Skip where PyTorch raises for it."""
    with quiet():
        try:
            module = load(program)
        except Exception as error:
            raise Skip(one_line(error)) from error
        try:
            yield from _check_mask(module.mask_mod, program, routes, gradients, inner)
        finally:
            module.unload()


def _check_mask(mask_mod, program, routes, gradients, inner):
    B, H, Q, K, D = (program.sizes[name] for name in "BHQKD")
    block = 16
    try:
        mask = flex.create_mask(mask_mod, B, H, Q, K, device="cpu")
        block_mask = flex.create_block_mask(mask_mod, B, H, Q, K, device="cpu", BLOCK_SIZE=block)
    except Exception as error:
        raise Skip(one_line(error)) from error
    if mask.dtype != torch.bool:
        raise Skip("the mask_mod gives no bool")
    if mask.shape != (B, H, Q, K):
        raise Skip("the mask_mod gives more than one value for a pair")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, n, D, generator=generator) for n in (Q, K, K))
    dout = torch.randn(B, H, Q, D, generator=generator)

    if "lists" in routes:
        ours = functools.partial(
            magi_compile.create_block_mask, mask_mod, B, H, Q, K, device="cpu", BLOCK_SIZE=block
        )
        yield judge("lists", ours, lambda got: same_lists(got, block_mask))

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = dense(*leaves, mask)
    want = [want.detach(), *torch.autograd.grad(want, leaves, dout.double())]

    if "eager" in routes:
        attend = functools.partial(magi_compile.flex_attention, block_mask=block_mask)
        ours = functools.partial(run_with_gradients, attend, q, k, v, dout if gradients else None)
        yield judge("eager", ours, lambda got: difference(got, want))
    if not any(route.startswith("compiled") for route in routes):
        return

    def inside(q, k, v):
        return flex.flex_attention(
            q,
            k,
            v,
            block_mask=flex.create_block_mask(mask_mod, B, H, Q, K, device="cpu", BLOCK_SIZE=block),
        )

    def outside(q, k, v, block_mask):
        return flex.flex_attention(q, k, v, block_mask=block_mask)

    def lowered_now(run):
        report = magi_compile.lowering_report()
        before = len(report.lowered)
        result = run()
        return result, len(report.lowered) > before

    for route, f in (
        ("compiled, mask inside", inside),
        ("compiled, mask outside", lambda q, k, v: outside(q, k, v, block_mask)),
    ):
        if route.replace("compiled, mask ", "compiled ") not in routes and "compiled" not in routes:
            continue
        state = {}

        def run(f=f, state=state):
            step = compiled(f, inner)
            result, state["lowered"] = lowered_now(
                lambda: run_with_gradients(step, q, k, v, dout if gradients else None)
            )
            if state["lowered"] and f is inside:
                state["way"] = way(f, q, k, v)
            return result

        verdict = judge(route, run, lambda got: difference(got, want))
        if verdict.outcome == "equal" and not state.get("lowered"):
            reasons = [r for d in magi_compile.lowering_report().refused[-1:] for r in d.reasons]
            verdict = Verdict(route, "refused", "; ".join(reasons))
        elif verdict.outcome == "equal":
            verdict.detail = state.get("way", "")
        yield verdict
    magi_compile.lowering_report().clear()
    torch._dynamo.reset()


def check_score(program, routes=("eager",), inner="eager"):
    """The verdicts of one score_mod beside PyTorch's eager FlexAttention, output and gradients."""
    with quiet():
        try:
            module = load(program)
        except Exception as error:
            raise Skip(one_line(error)) from error
        try:
            yield from _check_score(module, program, routes, inner)
        finally:
            module.unload()


def _check_score(module, program, routes, inner):
    B, H, Q, K, D = (program.sizes[name] for name in "BHQKD")
    dtype, scale = getattr(torch, program.sizes["dtype"]), program.sizes["scale"]
    score_mod, mask_mod = module.score_mod, getattr(module, "mask_mod", None)
    generator = torch.Generator().manual_seed(0)
    # Small integers: every score is exact in any order of additions and any dtype.
    q, k = (torch.randint(-2, 3, (B, H, n, D), generator=generator).to(dtype) for n in (Q, K))
    v = torch.randn(B, H, K, D, generator=generator).to(dtype)
    dout = torch.randn(B, H, Q, D, generator=generator).to(dtype)
    block_mask = mask_mod and flex.create_block_mask(mask_mod, B, H, Q, K, device="cpu")

    def theirs(q, k, v):
        return flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale)

    mask = flex.create_mask(mask_mod, B, H, Q, K, device="cpu") if mask_mod else None

    largest = []

    def written_out(q, k, v):
        """What eager FlexAttention computes; it has no gradients on a CPU."""
        scores = (q @ k.transpose(-1, -2)).float() * (D**-0.5 if scale is None else scale)
        f = score_mod
        for dims in (
            (0, None, None, None, 0),
            (0, None, None, 0, None),
            (0, None, 0, None, None),
            (0, 0, None, None, None),
        ):
            f = torch.vmap(f, in_dims=dims)
        scores = f(scores, *map(torch.arange, (B, H, Q, K)))
        finite = scores[scores.isfinite()]
        largest.append(finite.detach().abs().max().item() if len(finite) else 0.0)
        if mask is not None:
            scores = torch.where(
                mask,
                scores,
                torch.tensor(
                    -torch.inf, dtype=scores.dtype if scores.is_floating_point() else None
                ),
            )
        weights = torch.where((scores == -torch.inf).all(-1, keepdim=True), 0, scores.softmax(-1))
        return (weights.to(v.dtype) @ v).to(q.dtype)

    def ours(q, k, v):
        return magi_compile.flex_attention(
            q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale
        )

    try:
        if (
            "compiled" in routes
        ):  # Dynamo reads the score_mod for this, which takes longer than all the rest
            out = theirs(q.float(), k.float(), v.float())
        want = run_with_gradients(written_out, q.float(), k.float(), v.float(), dout.float())
        plain = run_with_gradients(written_out, q, k, v, dout)
        assert "compiled" not in routes or torch.allclose(
            out, want[0], rtol=1e-4, atol=1e-5, equal_nan=True
        ), "the oracle is not PyTorch's"
    except Exception as error:
        raise Skip(one_line(error)) from error

    def check(got):
        for name, x, y, z in zip(("out", "dq", "dk", "dv"), got, want, plain, strict=True):
            if name != "out" and max(largest) > 1e4:
                continue  # a log-sum-exp in fp32 does not tell how many keys share the largest score
            if max(largest) > 1e6 and not x.isnan().any():
                continue  # nor, of large ones, which of two is larger
            if x.dtype != z.dtype:
                return f"{name} is {x.dtype}, PyTorch's is {z.dtype}"
            unit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
            slack = 1.0 if name == "out" else max(1.0, *largest)  # weights are as exact as scores
            finite = y.isfinite()
            # Scores and derivatives of hidden pairs that are inf or nan make gradients nan in PyTorch, and never in
            # ours.
            spares_hidden = name != "out" and mask is not None and not bool(mask.all())
            if spares_hidden and not (finite & ~x.float().isfinite()).any():
                pass
            elif not torch.equal(x.float().isfinite(), z.float().isfinite()) and not torch.equal(
                x.float().isfinite(), finite
            ):
                ours, theirs = int((~x.float().isfinite()).sum()), int((~finite).sum())
                return f"{name}: {ours} not finite, PyTorch has {theirs} of {y.numel()}"
            size = y[finite].abs().max().item() if finite.any() else 0.0
            both = finite & x.float().isfinite()
            error = (x.float() - y)[both].abs().max().item() if both.any() else 0.0
            theirs = (z.float() - y)[both].abs().nan_to_num().max().item() if both.any() else 0.0
            if error > 4 * unit * max(size, 1.0) * slack + 2 * theirs:
                return f"{name} differs by {error:.3g} where PyTorch does by {theirs:.3g}, of {size:.3g}"
        return None

    if "eager" in routes:
        yield judge("score, eager", lambda: run_with_gradients(ours, q, k, v, dout), check)
    if "compiled" in routes:
        state = {}

        def run():
            report = magi_compile.lowering_report()
            before = len(report.lowered)
            result = run_with_gradients(compiled(theirs, inner), q, k, v, dout)
            state["lowered"] = len(report.lowered) > before
            return result

        verdict = judge("score, compiled", run, check)
        if verdict.outcome == "equal" and not state.get("lowered"):
            reasons = [r for d in magi_compile.lowering_report().refused[-1:] for r in d.reasons]
            verdict = Verdict("score, compiled", "refused", "; ".join(reasons))
        yield verdict
        magi_compile.lowering_report().clear()
        torch._dynamo.reset()


def summary_of(verdicts):
    """One word for one program: the worst that any route made of it."""
    outcomes = [verdict.outcome for verdict in verdicts]
    if "refused" in outcomes and "torch.compile raises" in outcomes:
        outcomes = [x for x in outcomes if x != "refused"] + ["refused as by torch.compile"]
    for word, names in (
        ("wrong", ("WRONG", "WRONG, SEEN")),
        ("raised", ("RAISES", "data error")),
        ("refused", ("refused",)),
        ("refused, and torch.compile raises", ("refused as by torch.compile",)),
        ("PyTorch raises", ("uint8 index", "torch.compile raises")),
    ):
        if any(name in outcomes for name in names):
            return word
    ways = {verdict.detail for verdict in verdicts if verdict.detail}
    return " ".join(["right", *sorted(ways)[:1]])


def number_of(seed, index):
    return seed * 1_000_003 + index


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="programs of each kind")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("mask", "score", "both"), default="both")
    parser.add_argument(
        "--compile-every", type=int, default=50, help="the share that goes through Dynamo as well"
    )
    parser.add_argument("--inductor-every", type=int, default=0)
    parser.add_argument("--limit", type=int, default=200, help="failing programs to print")
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    histogram, reasons, examples = collections.Counter(), collections.Counter(), {}
    summary = collections.Counter()
    printed, begin, done = 0, time.time(), 0
    for kind in ("mask", "score") if args.kind == "both" else (args.kind,):
        for index in range(args.start, args.start + args.count):
            if time.time() - begin > args.seconds:
                break
            done += 1
            program = program_of(kind, FromRandom(number_of(args.seed, index)))
            through_dynamo = args.compile_every and index % args.compile_every == 0
            inner = (
                "inductor" if args.inductor_every and index % args.inductor_every == 0 else "eager"
            )
            try:
                if kind == "mask":
                    routes = (
                        ("lists", "eager", "compiled") if through_dynamo else ("lists", "eager")
                    )
                    verdicts = list(
                        check_mask(program, routes, gradients=index % 4 == 0, inner=inner)
                    )
                else:
                    verdicts = list(
                        check_score(
                            program, ("eager", "compiled") if through_dynamo else ("eager",), inner
                        )
                    )
            except Skip as skip:
                histogram[kind, "PyTorch raises"] += 1
                summary[kind, "PyTorch raises"] += 1
                reasons[kind, "PyTorch raises", reason(str(skip))] += 1
                continue
            summary[kind, summary_of(verdicts)] += 1
            for verdict in verdicts:
                histogram[verdict.route, verdict.outcome] += 1
                if verdict.detail:
                    key = (verdict.route, verdict.outcome, reason(verdict.detail))
                    reasons[key] += 1
                    examples.setdefault(key, (index, program))
            failing = [v for v in verdicts if v.fails]
            if failing and printed < args.limit:
                printed += 1
                print(f"\n=== {kind} {index}")
                for verdict in failing:
                    print(f"!!! {verdict.route}: {verdict.outcome}: {verdict.detail}")
                print(program, flush=True)
    print(f"\n{done} programs in {time.time() - begin:.0f} s")
    for key, n in sorted(histogram.items()):
        print(f"{n:7d}  {', '.join(key)}")
    print("\nof each program, the worst of its routes")
    for key, n in sorted(summary.items()):
        print(f"{n:7d}  {', '.join(key)}")
    print()
    for key, n in sorted(reasons.items(), key=lambda item: (item[0][0], item[0][1], -item[1])):
        first = examples.get(key)
        print(f"{n:7d}  {' | '.join(key)}" + (f"  (first: {first[0]})" if first else ""))
    return 1 if printed else 0


if __name__ == "__main__":
    sys.exit(main())
