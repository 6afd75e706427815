"""The table of operators: every spelling computes what PyTorch does, in each language that has one."""

import ctypes
import operator
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from magi_compile.functions.operators import OPERATORS, Kind, num_operands
from magi_compile.kernels.sm90.codegen.pointwise import ELEMENTS
from magi_compile.masks.expr.integers import Value, apply
from magi_compile.masks.program.read import read_mask_mod
from tests.kernels.support.cpp import compile_library
from tests.support.triton_interpreter import needs_triton, run_interpreted

LENGTH = 24
OF_FLOATS = (Kind.ROOT, Kind.FLOAT)
SPELLED = {name: found for name, found in OPERATORS.items() if found.kind is not Kind.RULE}


def function_of(name):
    """PyTorch's function, or Python's operator."""
    if name.startswith("div_"):
        return lambda x, y: torch.div(x, y, rounding_mode=name.removeprefix("div_"))
    found = (getattr(module, name, None) for module in (torch, operator))
    return next((f for f in found if f is not None), None) or getattr(operator, f"{name}_")


# Masks


OPERANDS = (
    lambda q, kv: (q * 2 - 3, kv % 5 + 1),
    lambda q, kv: (q * 2 - 3, 2),
    lambda q, kv: (q > 3, kv > 2),
)


def value_of(expr):
    if expr.op in ("int", "bool"):
        return Value(expr.args[0], expr.args[0], expr.args[0])
    if expr.op == "var":
        index = torch.arange(LENGTH, dtype=torch.int32)
        return Value(index[:, None] if expr.args[0] == "q" else index[None], 0, LENGTH - 1)
    return apply(expr.op, [value_of(arg) for arg in expr.args])


@pytest.mark.parametrize("name", [name for name, found in SPELLED.items() if found.mask])
def test_masks(name):
    function, found = function_of(name), OPERATORS[name]
    count, compared = num_operands(found.cuda), 0
    for operands in OPERANDS:

        def mask_mod(b, h, q, kv, operands=operands):
            result = function(*operands(q, kv)[:count])
            return result if result.dtype == torch.bool else result >= 2

        try:
            wanted = create_mask(mask_mod, 1, 1, LENGTH, LENGTH, device="cpu")[0, 0]
        except (RuntimeError, TypeError, IndexError):  # PyTorch has no such operator of these
            continue
        expr = read_mask_mod(mask_mod).program.expr
        if not expr.reasons and all(node.op != "table" for node in expr.walk()):
            compared += 1
            data = value_of(expr).data
            assert torch.equal(torch.as_tensor(data).expand(LENGTH, LENGTH), wanted), (name, expr)
    assert compared


# CUDA


def samples(dtype):
    """Operands, the second of which divides."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return [torch.randint(0, 2, (LENGTH,), generator=generator).bool() for _ in range(2)]
    if dtype.is_floating_point:
        x = torch.rand(LENGTH, generator=generator, dtype=dtype) * 4 + 0.01
        return [x, torch.randn(LENGTH, generator=generator, dtype=dtype) * 3]
    x = torch.randint(-90, 90, (LENGTH,), generator=generator)
    return [x.to(dtype), torch.randint(1, 7, (LENGTH,), generator=generator).to(dtype)]


def wanted_of(name, dtype):
    """What PyTorch computes; None where it has no such operator of this dtype, or in another one."""
    found, operands = OPERATORS[name], samples(dtype)
    if found.kind is Kind.TRUTH and dtype != torch.bool:
        return None
    if found.kind in OF_FLOATS and not dtype.is_floating_point:
        return None
    try:
        result = function_of(name)(*operands[: num_operands(found.cuda)])
    except (RuntimeError, TypeError):
        return None
    if found.kind is Kind.ROUNDING and not dtype.is_floating_point:
        return None
    is_truth = found.kind in (Kind.COMPARISON, Kind.TRUTH, Kind.QUESTION)
    return result if result.dtype == (torch.bool if is_truth else dtype) else None


def test_cuda(tmp_path_factory):
    cases = {
        (name, dtype): wanted
        for name in dict.fromkeys(found.names.split()[0] for found in SPELLED.values())
        for dtype in (
            torch.bool,
            torch.int8,
            torch.int32,
            torch.int64,
            torch.float32,
            torch.float64,
        )
        if (wanted := wanted_of(name, dtype)) is not None
    }
    assert {name for name, _ in cases} == {found.names.split()[0] for found in SPELLED.values()}
    lines = []
    for number, ((name, dtype), wanted) in enumerate(cases.items()):
        kind, result = ELEMENTS[dtype], ELEMENTS[wanted.dtype]
        text = OPERATORS[name].cuda.format("x", "y")
        lines += [
            f"case {number}: for (int i = 0; i < {LENGTH}; ++i) {{",
            f"const {kind} x = (({kind}*)a)[i], y = (({kind}*)b)[i];",
            f"(({result}*)out)[i] = {text};",
            "} return;",
        ]
    main = [
        *('#include "common/ptx.cuh"', '#include "scores/functions.cuh"', "using namespace ffa;"),
        'extern "C" void run(int number, void* a, void* b, void* out) { switch (number) {',
        *(*lines, "} }"),
    ]
    replaced = {"common/ptx.cuh": "ptx_on_a_cpu.cuh", "common/wgmma.cuh": "wgmma_on_a_cpu.cuh"}
    library = compile_library(tmp_path_factory, "\n".join(main), "-O0", replaced)
    for number, ((name, dtype), wanted) in enumerate(cases.items()):
        found = torch.empty_like(wanted)
        tensors = [*samples(dtype), found]
        library.run(number, *(ctypes.c_void_p(x.data_ptr()) for x in tensors))
        is_exact = OPERATORS[name].kind not in OF_FLOATS
        how = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(
            found, wanted, **how, equal_nan=True, msg=lambda m, at=(name, dtype): f"{at}: {m}"
        )


# Triton


@needs_triton
def test_triton_in_the_interpreter():
    run_interpreted(Path(__file__).parent / "support" / "interpreted_operators.py")
