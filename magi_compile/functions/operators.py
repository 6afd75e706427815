"""The table of PyTorch's operators on numbers, with the spelling of each in every language of functions.

A spelling with places for operands, `{0}` and `{1}`, is all that a language needs to know of an operator. Else it names
a rule of the language's writer, which looks at the whole call. Without a spelling, a function with this operator has no
text in that language.

| Language | Read by |
|---|---|
| `mask`: a rule, and its arguments | `masks/program/operators.py`, which makes mask expressions |
| `cuda` | `kernels/sm90/codegen/operations.py`, with `functions/pointwise.cuh` and `scores/functions.cuh` |
| `triton` | `kernels/triton/score_expressions.py` |
"""

from __future__ import annotations

from enum import Enum, auto
from string import Formatter
from typing import NamedTuple


class Kind(Enum):
    """The dtype in which an operator computes, and that of its result."""

    RESULT = auto()  # in the dtype of the result
    DIVISION = auto()  # the same, with a divisor: those of integers must not be zero
    ROUNDING = auto()  # the same; integers stay as they are
    ROOT = auto()  # the same, of floats alone
    FLOAT = auto()  # the same, approximately: for scores
    COMPARISON = auto()  # in what the operands are promoted to; the result is a truth value
    TRUTH = auto()  # in truth values: of numbers, whether they are not 0
    QUESTION = auto()  # in the operand's own dtype; the result is a truth value
    RULE = auto()  # as the rule of each language says


class Operator(NamedTuple):
    """An operator and its spellings; `names` are those that graphs have for it, as `name_of` spells them."""

    names: str
    kind: Kind
    mask: str = ""
    cuda: str = ""
    triton: str = ""


def num_operands(spelling: str) -> int:
    """The number of operands that a spelling has places for; 0: it is none, or names a rule."""
    return len({name for _, name, _, _ in Formatter().parse(spelling) if name is not None})


_MINIMUM = "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_MAXIMUM = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_TABLE = [
    Operator("add", Kind.RESULT, "arithmetic add or", "ops::add({0}, {1})", "({0} + {1})"),
    Operator("sub subtract", Kind.RESULT, "arithmetic sub", "ops::sub({0}, {1})", "({0} - {1})"),
    Operator("rsub", Kind.RESULT, "reversed_sub", "ops::sub({1}, {0})"),
    Operator("mul multiply", Kind.RESULT, "arithmetic mul and", "ops::mul({0}, {1})", "({0} * {1})"),
    Operator("neg negative", Kind.RESULT, "arithmetic neg", "ops::neg({0})", "(-{0})"),
    Operator("abs absolute", Kind.RESULT, "arithmetic abs", "ops::abs({0})", "tl.abs({0})"),
    Operator("minimum min", Kind.RESULT, "arithmetic min and", "ops::minimum({0}, {1})", _MINIMUM),
    Operator("maximum max", Kind.RESULT, "arithmetic max or", "ops::maximum({0}, {1})", _MAXIMUM),
    Operator("clamp_min", Kind.RESULT, "clamp_min", "ops::maximum({0}, {1})"),
    Operator("clamp_max", Kind.RESULT, "clamp_max", "ops::minimum({0}, {1})"),
    Operator("sign sgn", Kind.RESULT, "", "ops::sign({0})", "sign"),
    Operator("bitwise_and and", Kind.RESULT, "bitwise and", "({0} & {1})", "({0} & {1})"),
    Operator("bitwise_or or", Kind.RESULT, "bitwise or", "({0} | {1})", "({0} | {1})"),
    Operator("bitwise_xor xor", Kind.RESULT, "bitwise xor", "({0} ^ {1})", "({0} ^ {1})"),
    Operator("bitwise_not invert inv", Kind.RESULT, "not", "ops::invert({0})", "not"),
    Operator("bitwise_left_shift lshift", Kind.RESULT, "shift mul", "ops::left_shift({0}, {1})"),
    Operator("bitwise_right_shift rshift", Kind.RESULT, "shift floordiv", "ops::right_shift({0}, {1})"),
    Operator("floor", Kind.ROUNDING, "", "ops::floor({0})", "tl.floor({0})"),
    Operator("ceil", Kind.ROUNDING, "", "ops::ceil({0})", "tl.ceil({0})"),
    Operator("trunc", Kind.ROUNDING, "", "ops::trunc({0})"),
    Operator("round", Kind.ROUNDING, "", "ops::round({0})"),
    Operator("sqrt", Kind.ROOT, "", "ops::sqrt({0})", "tl.sqrt({0})"),
    Operator("reciprocal", Kind.ROOT, "", "(1 / {0})", "(1.0 / {0})"),
    Operator("floor_divide floordiv", Kind.DIVISION, "arithmetic floordiv", "ops::floor_divide({0}, {1})", "divided"),
    Operator("div_floor", Kind.DIVISION, "", "ops::floor_divide({0}, {1})"),  # `div` with this rounding_mode
    Operator("div_trunc", Kind.DIVISION, "", "ops::divide_to_zero({0}, {1})"),
    Operator("remainder mod", Kind.DIVISION, "arithmetic mod", "ops::remainder({0}, {1})", "remainder"),
    Operator("fmod", Kind.DIVISION, "", "ops::fmod({0}, {1})"),
    Operator("lt less", Kind.COMPARISON, "comparison lt", "({0} < {1})", "({0} < {1})"),
    Operator("le less_equal", Kind.COMPARISON, "comparison le", "({0} <= {1})", "({0} <= {1})"),
    Operator("gt greater", Kind.COMPARISON, "comparison gt", "({0} > {1})", "({0} > {1})"),
    Operator("ge greater_equal", Kind.COMPARISON, "comparison ge", "({0} >= {1})", "({0} >= {1})"),
    Operator("eq", Kind.COMPARISON, "comparison eq", "({0} == {1})", "({0} == {1})"),
    Operator("ne not_equal", Kind.COMPARISON, "comparison ne", "({0} != {1})", "({0} != {1})"),
    Operator("logical_and", Kind.TRUTH, "logical and", "({0} & {1})", "({0} & {1})"),
    Operator("logical_or", Kind.TRUTH, "logical or", "({0} | {1})", "({0} | {1})"),
    Operator("logical_xor", Kind.TRUTH, "logical xor", "({0} ^ {1})", "({0} ^ {1})"),
    Operator("logical_not", Kind.TRUTH, "logical not", "!{0}", "({0} == 0)"),
    Operator("isnan", Kind.QUESTION, "", "({0} != {0})"),
    Operator("isinf", Kind.QUESTION, "", "ops::is_inf({0})"),
    Operator("exp", Kind.FLOAT, "", "ops::exp({0})", "tl.exp({0})"),
    Operator("exp2", Kind.FLOAT, "", "ops::exp2({0})", "tl.exp2({0})"),
    Operator("expm1", Kind.FLOAT, "", "ops::expm1({0})"),
    Operator("log", Kind.FLOAT, "", "ops::log({0})", "tl.log({0})"),
    Operator("log2", Kind.FLOAT, "", "ops::log2({0})", "tl.log2({0})"),
    Operator("log1p", Kind.FLOAT, "", "ops::log1p({0})"),
    Operator("sin", Kind.FLOAT, "", "ops::sin({0})", "tl.sin({0})"),
    Operator("cos", Kind.FLOAT, "", "ops::cos({0})", "tl.cos({0})"),
    Operator("erf", Kind.FLOAT, "", "ops::erf({0})", "tl.erf({0})"),
    Operator("tanh", Kind.FLOAT, "", "ops::tanh({0})", "(2 * tl.sigmoid(2 * {0}) - 1)"),
    Operator("sigmoid", Kind.FLOAT, "", "ops::sigmoid({0})", "tl.sigmoid({0})"),
    Operator("rsqrt", Kind.FLOAT, "", "ops::rsqrt({0})", "(1.0 / tl.sqrt({0}))"),
    Operator("where", Kind.RULE, "where", "where", "where"),
    Operator("clamp clip", Kind.RULE, "clamp", "clamp", "clamp"),
    Operator("pow", Kind.RULE, "", "power", "power"),
    Operator("div divide truediv", Kind.RULE, "divide", "divide", "divided"),
    Operator("relu", Kind.RULE, "", "relu", "relu"),
    Operator("to_copy convert_element_type", Kind.RULE, "convert", "convert", "converted"),
    Operator("to type bool int long float double half bfloat16", Kind.RULE, "convert"),
    Operator("clone", Kind.RULE, "same", "convert", "converted"),
    Operator("contiguous detach", Kind.RULE, "same", "convert"),
    Operator("alias lift_fresh_copy lift_fresh", Kind.RULE, "", "convert"),
    Operator("pos positive", Kind.RULE, "same"),
    Operator("index getitem", Kind.RULE, "get_item"),
    Operator("expand", Kind.RULE, "", "", "converted"),
    # A number that stands in the call: the number itself, or where it is among the arguments.
    Operator("ones_like", Kind.RULE, "constant 1", "number 1", "constant"),
    Operator("zeros_like", Kind.RULE, "constant 0", "number 0", "constant"),
    Operator("new_ones", Kind.RULE, "new 1", "number 1"),
    Operator("new_zeros", Kind.RULE, "new 0", "number 0"),
    Operator("ones", Kind.RULE, "", "number 1", "constant"),
    Operator("zeros", Kind.RULE, "", "number 0", "constant"),
    Operator("full", Kind.RULE, "", "argument 1", "constant"),
    Operator("full_like", Kind.RULE, "full_like", "argument 1", "constant"),
    Operator("new_full", Kind.RULE, "full", "argument 2"),
    Operator("scalar_tensor", Kind.RULE, "", "argument 0", "constant"),
]  # fmt: skip
OPERATORS = {name: operator for operator in _TABLE for name in operator.names.split()}
