"""Operators that have a spelling in Triton, in its CPU interpreter. Not collected:
`tests/kernels/test_operators.py` runs this file."""

import linecache

import pytest
import torch

from magi_compile import _compat
from magi_compile.functions.operators import OPERATORS, Kind, num_operands
from magi_compile.kernels.triton.score_expressions import Operand, expression
from tests.kernels.test_operators import LENGTH, OF_FLOATS, function_of, samples

NAMES = [
    found.names.split()[0]
    for found in dict.fromkeys(OPERATORS.values())
    if found.kind is not Kind.RULE and found.triton
]
HEAD = (
    "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef run(a, b, out):\n    i "
    "= tl.arange(0, 32)[None, :]\n"
)


def kernel_of(function, dtype, count):
    """A kernel of one operator, whose nodes `expression` writes."""
    mode = _compat.symbolic_fake_mode()
    with mode:
        examples = [torch.empty((), dtype=dtype, device="cpu") for _ in range(count)]
    graph = _compat.traced_to_aten(function, examples, mode, decompose=True).graph
    names = iter("ab")
    lines, known = [], {}
    for node in graph.nodes:
        if node.op == "placeholder":
            name = next(names)
            known[node] = f"x{name}"
            lines.append(f"    x{name} = tl.load({name} + i, mask=i < {LENGTH}, other=1)\n")
            if dtype == torch.bool:
                lines.append(f"    x{name} = x{name} != 0\n")
        elif node.op == "call_function":
            known[node] = f"y{len(known)}"
            lines.append(f"    {known[node]} = {expression(node, known)}\n")
        else:
            result = Operand(node.args[0], known).in_dtype(None)
            lines.append(f"    tl.store(out + i, {result}, mask=i < {LENGTH})\n")
    source = HEAD + "".join(lines)
    name = f"<operator {abs(hash(source)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = {"__name__": __name__}
    exec(compile(source, name, "exec"), module)
    return module["run"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_triton(name, dtype):
    found, operands = OPERATORS[name], samples(dtype)
    count = num_operands(found.cuda)
    if found.kind in OF_FLOATS and dtype != torch.float32:
        pytest.skip("of floats")
    if found.kind is Kind.TRUTH and dtype != torch.bool:
        pytest.skip("of truth values")
    if name in ("remainder", "floor_divide") and dtype == torch.float32:
        pytest.skip("of integers")
    try:
        wanted = function_of(name)(*operands[:count])
    except (RuntimeError, TypeError):
        pytest.skip("PyTorch has none")
    if wanted.dtype not in (dtype, torch.bool):
        pytest.skip("in another dtype")
    got = torch.empty_like(wanted)
    kernel_of(function_of(name), dtype, count)[(1,)](*operands, got)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
