"""The records of arguments are those of the schemas."""

import pytest
import torch

from magi_compile.dtensor import ops as _ops  # noqa: F401  the ops exist once it is imported
from magi_compile.dtensor.arguments import BackwardOptions, Options

X, Y = torch.zeros(1), torch.zeros(2)
NAMES = (X, Y, 0.5, 0.0, "cpu", "auto", "a", "b")


@pytest.mark.parametrize(
    ("op", "record"),
    [("cp_ffa_fwd", Options), ("cp_attention", Options), ("cp_ffa_bwd", BackwardOptions)],
)
def test_fields_and_defaults_are_those_of_the_schema(op, record):
    schema = getattr(torch.ops.magi, op).default._schema
    arguments = schema.arguments[-len(record._fields) :]
    assert tuple(x.name for x in arguments) == record._fields
    assert arguments[0].name == "meta"
    defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}
    given = {
        name: list(x) if isinstance(x, tuple) else x for name, x in record._field_defaults.items()
    }
    assert defaults == given


def test_a_backward_and_its_forward():
    forward = Options(*NAMES, 3, True, [X], [4], "score", [0, 1], [0, 1, 2, 3])
    backward = BackwardOptions.of(forward, [0])
    assert backward == BackwardOptions(*NAMES, 3, [X], [4], "score", [0, 1], [0, 1, 2, 3], [0])
    assert backward.of_forward == forward._replace(return_max_scores=False)


def test_what_says_nothing_is_left_out():
    assert BackwardOptions(*NAMES, 1, [], [], "", None, None, []).short() == (*NAMES, 1)
    shared = BackwardOptions(*NAMES, share=[0, 1, 2, 3]).short()
    assert shared == (*NAMES, 1, None, None, "", None, [0, 1, 2, 3])
