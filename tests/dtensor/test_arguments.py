"""The records of arguments are those of the schemas."""

import pytest
import torch

from magi_compile.dtensor.call import ops as _ops  # noqa: F401  the ops exist once it is imported
from magi_compile.dtensor.call.arguments import BackwardOptions, Options

NAMES = (torch.zeros(1), torch.zeros(2), 0.5, 0.0, "cpu", "auto", "a", "b")


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


def test_both_passes_have_the_same_numbers_in_front():
    in_front = Options._fields.index("return_max_scores")
    assert Options._fields[:in_front] == BackwardOptions._fields[:in_front]
    assert Options._fields[in_front + 1 :] == BackwardOptions._fields[in_front:-1]
    assert not BackwardOptions(*NAMES).return_max_scores
