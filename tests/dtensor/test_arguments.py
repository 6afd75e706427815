"""The records of arguments are those of the schemas."""

import pytest
import torch

from magi_compile.dtensor.call import ops as _ops  # noqa: F401  the ops exist once it is imported
from magi_compile.dtensor.call.arguments import Options

NAMES = (torch.zeros(1), torch.zeros(2), 0.5, 0.0, "cpu", "auto", "a", "b")


@pytest.mark.parametrize(
    ("op", "left_out"),
    [("cp_ffa_fwd", "wanted"), ("cp_attention", "wanted"), ("cp_ffa_bwd", "return_max_scores")],
)
def test_fields_and_defaults_are_those_of_the_schema(op, left_out):
    schema, fields = getattr(torch.ops.magi, op).default._schema, [*Options._fields]
    fields.remove(left_out)
    arguments = schema.arguments[-len(fields) :]
    assert [x.name for x in arguments] == fields
    assert arguments[0].name == "meta"
    defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}
    given = {
        name: list(x) if isinstance(x, tuple) else x
        for name, x in Options._field_defaults.items()
        if name != left_out
    }
    assert defaults == given


@pytest.mark.parametrize("number", range(len(NAMES), len(Options._fields)))
def test_the_last_arguments_of_a_backward_may_be_left_out(number):
    given = (*NAMES, 2, None, None, "s", [-1, -1], [0, 0, 1, 1], [0])[:number]
    options = Options.of_backward(*given)
    assert options.wanted == ([0] if number == len(Options._fields) - 1 else ())
    assert not options.return_max_scores
    assert (
        options[:number] == given
        if number < len(Options._fields) - 1
        else options.share == [0, 0, 1, 1]
    )
