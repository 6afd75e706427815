"""Mask_mods by one CUDA source show what tensor operations show, bit for bit: compiled for the CPU here,
as it is on a GPU."""

import contextlib
import ctypes
import re
from functools import cache
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile import MaskDataError, _checks
from magi_compile.functions import guards
from magi_compile.functions.text import in_ops, mask_mod_of, names_of_captures
from magi_compile.kernels.sm90.codegen.pointwise import UnknownOperation
from magi_compile.kernels.sm90.masks import mask_bits
from magi_compile.kernels.sm90.masks.bits_source import bits_source
from magi_compile.kernels.sm90.masks.mask_graph import mask_graph
from magi_compile.kernels.sm90.runtime import calls, nvrtc
from magi_compile.masks import AttnSlices, MaskProgram
from magi_compile.masks.bits import FIRST_BITS
from magi_compile.masks.evaluation.bit_blocks import Listed, slices_with_bits
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.program.read import read_mask_mod
from tests.kernels.support.cpp import compile_library
from tests.masks.support.mask_mods import MASK_MODS
from tests.programs import random_functions

CPU = torch.device("cpu")
SIZES = MaskSizes(2, 140, 150)
NUM_RANDOM = 60
GENERATOR = torch.Generator().manual_seed(0)


class Case(NamedTuple):
    program: MaskProgram
    tables: list[torch.Tensor]
    symbols: list[int]
    sizes: MaskSizes


def case_of(mask_mod, sizes, symbols=()) -> Case:
    traced = read_mask_mod(mask_mod)
    assert traced.program.is_verifiable
    return Case(traced.program, traced.tables, list(symbols), sizes)


def text_case(text, tables, symbols=(), sizes=SIZES) -> Case:
    names = [f"t{i}" for i in range(len(tables))] + [f"s{i}" for i in range(len(symbols))]
    code = f"def mask({', '.join(['b', 'h', 'q', 'kv', *names])}):;;     return {text}"
    return Case(MaskProgram.parse(f"mask;; {code}"), list(tables), list(symbols), sizes)


def numbers(low, high, *shape, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=GENERATOR).to(dtype)


def text_cases():
    """What only bits can say, and what PyTorch's dtypes make of it."""
    heads = MaskSizes(2, 140, 150, Heads(4, 2))
    ids, small = numbers(-3, 4, 150), numbers(-128, 128, 150, dtype=torch.int8)
    large, bytes_ = numbers(-(2**62), 2**62, 150), numbers(0, 256, 150, dtype=torch.uint8)
    floats, doubles = (
        torch.randn(150, generator=GENERATOR),
        torch.randn(150, generator=GENERATOR).double(),
    )
    floats[7], floats[8], floats[9], doubles[3] = float("nan"), float("inf"), -0.0, float("-inf")
    square = numbers(0, 5, 150, 150, dtype=torch.int32)
    entries = numbers(0, 3, 2, 4, 150, dtype=torch.int16)
    flags = numbers(0, 2, 150, dtype=torch.bool)
    chosen = numbers(0, 2, 2, 4, 3, 5, dtype=torch.bool)
    for text, tables, *symbols in (
        ("(t0[q] & t0[kv]) != 0", [ids]),
        ("t0[q, kv] > 2", [square]),
        ("t0[q][kv] == t0[kv, q]", [square]),
        ("((q - kv) % 3 == 0) & (q // 7 >= kv // 5)", []),
        ("(q ^ kv) % 4 & 2", []),
        ("((t0[q] << 1) | (t0[kv] >> 2)) > 5", [small]),
        ("(t0[q] << t1[kv]) > (t0[q] >> t1[kv])", [ids, ids]),
        ("~t0[q] % 3 == ~t0[kv] % 3", [ids]),
        ("t0[q] + t0[kv] > 0", [small]),
        ("t0[q] * t0[kv] > 100", [small]),
        ("t0[q] * t0[kv] - t0[q] > 5", [large]),
        ("t0[q] - t0[kv] > 100", [bytes_]),
        ("t0[q] // (t1[kv] * 2 + 1) > t0[q] % (t1[kv] * 2 + 1)", [small, ids]),
        ("torch.fmod(t0[q] - 9, t1[kv] * 2 + 1) > torch.div(t0[q], t1[kv] * 2 + 1, rounding_mode='trunc')", [ids, ids]),
        ("t0[q] < t1[kv]", [floats, doubles]),
        ("t0[q] + 0.1 < t0[kv] * 1.5 - t0[q]", [floats]),
        ("(t0[q] / t0[kv] > 1) | (q / kv > 3)", [floats]),
        ("t0[q] // t0[kv] > t0[q] % t0[kv]", [floats]),
        ("t0[q].round() == t0[kv].floor()", [floats]),
        ("t0[q].abs().sqrt() < t1[kv].trunc() + 1", [floats, doubles]),
        ("torch.isnan(t0[q]) | torch.isinf(t0[kv]) | ~(t0[q] == t0[q])", [floats]),
        ("torch.maximum(t0[q], t0[kv]) > torch.minimum(t0[q], t1[kv])", [floats, doubles]),
        ("t0[q].clamp(-0.5, 0.5) > t0[kv].clamp(min=0.1)", [floats]),
        ("t0[q] > 16777217", [large.float()]),
        ("(q + 16777217 > 16777217.0) & (kv > 2.5)", []),
        ("torch.where(t0[q], kv, q * 2) > torch.where(kv > 30, t1[kv], 2.5)", [flags, ids]),
        ("t0[q] + t0[kv]", [flags]),
        ("(t0[q] * t0[kv]) | (t0[q] ^ ~t0[kv])", [flags]),
        ("t0[q].logical_and(t1[kv]) | t1[q].logical_not()", [flags, ids]),
        ("t0[b, h, q] == t0[b, h, kv]", [entries]),
        ("t0[b][h][q] != t0[b, h][kv]", [entries]),
        ("t0[1, :, q][h] > t0[b, -1, kv]", [entries]),
        ("(q >= kv) & t0[b, h, q // 64, kv // 32]", [chosen]),
        ("(h * 30 + q >= kv) & (h % 2 == b)", []),
        ("(t0.cumsum(0)[q] > t0.flip(0)[kv]) & (t0.sum() < 100)", [ids]),
        ("(q - kv).abs() <= torch.tensor(9)", []),
        ("((q - kv) ** 2 + (q % 7 - kv % 7).square() < 300)", []),
        ("(q - s0 * 2 > kv) | ((kv + s1) % s0 == 0) | (t0[q] < s1)", [ids], 7, -3),
        ("t0[q].to(torch.int8) > t0[kv].to(torch.uint8)", [large]),
        ("(q == kv).int() + (q > 3).float() > 1", []),
        ("torch.clamp(q - kv, 2, 40) > kv.clamp(max=20)", []),
        ("torch.sign(t0[q]) == -torch.sign(t0[kv])", [ids]),
        ("t0[q - 150] == t0[kv - 1]", [ids]),
        ("kv + 0 < 300", []),
        ("q < 0", []),
        ("(q < 128) & (kv >= 128)", []),
    ):  # fmt: skip
        sizes = (
            heads
            if ("h" in text.replace("where", "").replace("maximum", "") and "[b" in text)
            or "h *" in text
            or ", h" in text
            else SIZES
        )
        yield text, text_case(text, tables, symbols, sizes)
    yield "one pair", text_case("q >= kv", [], sizes=MaskSizes(1, 1, 1))
    yield "one key", text_case("q >= 70", [], sizes=MaskSizes(3, 129, 1))
    for text, tables in (
        ("t0[q + kv] == 0", [ids]),
        ("t0[kv * 2] == t0[q]", [ids]),
        ("(t0[b, h, q] == 1) & (t0[b, h * 2, kv] == 0)", [entries]),
        ("q // (kv - 5) > t0[q - 151]", [ids]),
        ("q % t0[q] >= t0[kv]", [ids]),
    ):
        sizes = heads if "h" in text else SIZES
        yield f"wrong {text}", text_case(text, tables, sizes=sizes)


def random_cases():
    """Of the random mask_mods, those that have a text."""
    choices = random_functions.FromRandom(0)
    for number in range(NUM_RANDOM):
        choices.rng.seed(number)
        program = random_functions.program_of("mask", choices)
        with random_functions.quiet():
            try:
                module = random_functions.load(program)
                module.unload()
                traced = read_mask_mod(module.mask_mod)
            except Exception:  # PyTorch has its reasons, or the program that refuses it
                continue
        if traced.program.is_verifiable:
            batch, heads, seqlen_q, seqlen_k = (program.sizes[name] for name in "BHQK")
            sizes = MaskSizes(batch, seqlen_q, seqlen_k, Heads(heads, heads))
            yield f"random{number}", Case(traced.program, traced.tables, [], sizes)


def source_of(case):
    graph = mask_graph(case.program.functions["mask"], case.tables, CPU)
    return bits_source(graph, case.program.names)


TEXTS = dict(text_cases())
NAMES = [*MASK_MODS, *TEXTS]


@cache
def case_named(name: str) -> Case:
    if name in TEXTS:
        return TEXTS[name]
    return case_of(MASK_MODS[name](2, 130, 97), MaskSizes(2, 130, 97))


@cache
def cases_at_random() -> dict[str, Case]:
    """Those of which there is a kernel."""
    found = {}
    for name, case in random_cases():
        with contextlib.suppress(UnknownOperation):
            source_of(case)
            found[name] = case
    return found


MAIN = """
#include "masks/mask_bits.cuh"
{masks}
template <class Mask, bool kHasLists>
void run(const char* params, int block, int num_blocks) {{
    static ffa::BitsOfBlock shared;
    const auto& fixed = *reinterpret_cast<const ffa::MaskBitsParams*>(params);
    const auto* words = reinterpret_cast<const ffa::Int*>(params + sizeof(fixed));
    ffa::MaskBits<Mask, kHasLists>(fixed, words, shared).run(block, num_blocks);
}}
extern "C" void run(int mask, const char* params, int block, int num_blocks) {{
    switch (mask) {{
    {cases}
    }}
}}
"""
TRAPS = "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero"
REPLACED = {
    "common/block.cuh": "one_thread.cuh",
    "masks/lanes.cuh": "lanes_of_one_thread.cuh",
}


def compiled(directories, wanted):
    """The kernels of `wanted`, cases with or without lists, as one function of a prepared call and its tensors."""
    texts = dict.fromkeys((source_of(case).text, has_lists) for case, has_lists in wanted)
    numbers = {key: number for number, key in enumerate(texts)}
    masks = [
        text.replace("struct Mask ", f"struct Mask{number} ")
        for (text, _), number in numbers.items()
    ]
    lines = [
        f"case {number}: return run<ffa::Mask{number}, {str(has_lists).lower()}>(params, block, num_blocks);"
        for (_, has_lists), number in numbers.items()
    ]
    main = MAIN.format(masks="\n".join(masks), cases="\n".join(lines))
    options = f"-O0 -fno-sanitize-recover {TRAPS}"
    kernel = compile_library(directories, main, options, REPLACED).run

    def run(case: Case, listed: Listed | None = None) -> AttnSlices:
        given, prepared = mask_bits.prepare(*case, listed, CPU)
        made = [torch.full(x.shape, -1, dtype=x.dtype) for x in prepared.call.made]
        for tensor, buffer in zip(made, prepared.call.made, strict=True):
            tensor.view(-1)[: buffer.zeros] = 0
        for launch in prepared.call.launches:
            params = launch.params_at(calls.addresses_of([*given, *made]))
            has_lists = dict(launch.function.defines)["FFA_HAS_LISTS"] == "true"
            number = numbers[prepared.source.text, has_lists]
            for block in torch.randperm(launch.grid).tolist():
                kernel(
                    number, (ctypes.c_char * len(params)).from_buffer(params), block, launch.grid
                )
        return AttnSlices.unchecked(*made[:3], *case.sizes.totals, made[3])

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    wanted = [*map(case_named, NAMES), *cases_at_random().values()]
    return compiled(tmp_path_factory, [(case, False) for case in wanted])


def by_tensors(case: Case, listed: Listed | None = None) -> AttnSlices:
    captures = names_of_captures(case.tables, case.symbols)
    mask_mod = mask_mod_of(case.program.functions["mask"], captures, case.program.names)
    with in_ops():
        return slices_with_bits(mask_mod, case.sizes, listed, CPU)


def assert_same(actual: AttnSlices, wanted: AttnSlices) -> None:
    """The same slices; and the same bits, which have other numbers."""
    assert torch.equal(actual.q_ranges, wanted.q_ranges)
    assert torch.equal(actual.k_ranges, wanted.k_ranges)
    has_bits = wanted.mask_types >= FIRST_BITS
    place = torch.arange(len(has_bits))
    assert torch.equal(actual.mask_types, torch.where(has_bits, FIRST_BITS + place, 0).int())
    assert torch.equal(
        actual.bits[place[has_bits]], wanted.bits[wanted.mask_types[has_bits] - FIRST_BITS]
    )


def assert_right(case, run, monkeypatch):
    """The same as tensor operations: slices, bits and errors."""
    monkeypatch.setattr(guards, "is_needed", lambda device: True)
    try:
        wanted = by_tensors(case)
    except MaskDataError as error:
        run(case)
        with pytest.raises(MaskDataError, match=re.escape(str(error))):
            _checks.synchronize_checks()
        return
    assert_same(run(case), wanted)
    _checks.synchronize_checks()


@pytest.mark.parametrize("name", NAMES)
def test_the_source_on_the_host(name, run, no_flags, monkeypatch):
    assert_right(case_named(name), run, monkeypatch)


def test_random_masks(run, no_flags, monkeypatch):
    for name, case in cases_at_random().items():
        try:
            assert_right(case, run, monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"{name}: {case.program.text}") from error
    assert len(cases_at_random()) > NUM_RANDOM // 3


def right_lists(case, rows, keys, heads):
    """The lists that a mask needs, with blocks called full for whom nothing is hidden."""
    visible = by_tensors(case).to_dense().view(2, heads, case.sizes.seqlen_q, 2, heads, -1)
    mask = torch.stack(
        [torch.stack([visible[b, h, :, b, h] for h in range(heads)]) for b in (0, 1)]
    )
    num_q, num_k = -(-mask.shape[2] // rows), -(-mask.shape[3] // keys)
    seen, full = torch.zeros(2, 2, heads, num_q, num_k, dtype=torch.bool)
    for i in range(num_q):
        for j in range(num_k):
            part = mask[:, :, rows * i : rows * (i + 1), keys * j : keys * (j + 1)].flatten(2)
            seen[:, :, i, j], full[:, :, i, j] = part.any(2), part.all(2)
    return seen & ~full, full


def listed(case, grids, rows, keys):
    lists = [
        x
        for grid in grids
        for x in (grid.sum(-1).int(), grid.int().argsort(dim=-1, descending=True).int())
    ]
    return Listed.of(BlockLists(*lists), rows, keys, case.sizes)


BY_HEAD = text_case(
    "(t0[h, q] == t0[h, kv]) & (q >= kv) | (kv < 16) | (q > 128)",
    [torch.arange(150).div(20, rounding_mode="floor").expand(2, -1)],
    sizes=MaskSizes(2, 140, 150, Heads(2, 2)),
)
EVERYTHING = text_case("b.new_ones((), dtype=torch.bool)", [], sizes=BY_HEAD.sizes)


@pytest.fixture(scope="module")
def run_with_lists(tmp_path_factory):
    return compiled(tmp_path_factory, [(BY_HEAD, True), (EVERYTHING, True)])


@pytest.mark.parametrize("block", [(16, 16), (48, 80)], ids=str)
@pytest.mark.parametrize("wrong", [None, "left out", "called full"])
def test_block_lists(block, wrong, run_with_lists, no_flags):
    partial, full = right_lists(BY_HEAD, *block, heads=2)
    if wrong == "left out":
        full[1, 1, 2, 0] = partial[1, 1, 2, 0] = False
    elif wrong:
        full[0, 1, 0, -1] = True
    lists = listed(BY_HEAD, (partial, full), *block)
    if wrong != "called full":
        assert_same(run_with_lists(BY_HEAD, lists), by_tensors(BY_HEAD, lists))
        _checks.synchronize_checks()
        return
    with pytest.raises(MaskDataError) as by_torch:
        by_tensors(BY_HEAD, lists)
    run_with_lists(BY_HEAD, lists)
    with pytest.raises(MaskDataError, match=re.escape(str(by_torch.value))):
        _checks.synchronize_checks()


@pytest.mark.parametrize("heads", [1, 2])
def test_block_lists_that_decide(heads, run_with_lists, no_flags):
    grids = torch.rand(2, 2, heads, 9, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    lists = listed(EVERYTHING, (grids[0] & ~grids[1], grids[1]), 16, 80)
    assert_same(run_with_lists(EVERYTHING, lists), by_tensors(EVERYTHING, lists))


def test_the_first_pair_is_named(run, no_flags):
    """As tensor operations name it."""
    run(TEXTS["wrong t0[q + kv] == 0"])
    message = r"look up t0 at indices in \[-150, 150\), but it looks up 150 at q = 23, kv = 127"
    with pytest.raises(MaskDataError, match=message):
        _checks.synchronize_checks()


@pytest.mark.parametrize(
    "name", ["neighbourhood", "video_tiles", "t0[q] // t0[kv] > t0[q] % t0[kv]", "t0[b, h, q] == t0[b, h, kv]"]
)  # fmt: skip
def test_compiles(name):
    cubin, log = nvrtc.run_nvrtc(
        mask_bits.bits_variant(source_of(case_named(name)), has_lists=False)
    )
    assert cubin.startswith(b"\x7fELF")
    assert nvrtc.parse_resources(log).spilled_bytes == 0


def test_compiles_with_block_lists():
    for case in (BY_HEAD, EVERYTHING):
        _, log = nvrtc.run_nvrtc(mask_bits.bits_variant(source_of(case), has_lists=True))
        assert nvrtc.parse_resources(log).spilled_bytes == 0


def test_a_change_of_data_compiles_nothing(no_flags):
    """Only what is computed is in the source: no length, no captured int, no shape."""
    variants = set()
    for symbol, size in ((3, 20), (50, 330)):
        table = torch.arange(size).expand(2, -1)
        case = text_case(
            "t0[b][q - s0 // 2] & t0[b, kv] < s0", [table], [symbol], MaskSizes(2, size, size)
        )
        _, prepared = mask_bits.prepare(*case, None, CPU)
        variants |= {launch.function for launch in prepared.call.launches}
    assert len(variants) == 1


def test_a_captured_int_that_its_dtype_does_not_hold(no_flags):
    case = text_case("t0[q] < s0", [torch.arange(150).int()], [2**40])
    with pytest.raises(UnknownOperation, match=r"1099511627776 in torch.int32"):
        mask_bits.prepare(*case, None, CPU)


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("torch.exp(t0[q]) > t0[kv]", "`exp`"),
        ("t0[q].bfloat16() > 1", "numbers in torch.bfloat16"),
        ("(t0[None, 3:4] > kv)[0]", "a mask of shape [1]"),
        ("torch.stack([q, kv]).sum() > 3", "`stack`"),
        ("t0[torch.stack([q, kv])].sum() > 3", "`stack`"),
        ("q // 0 > kv", "a division by zero"),
        ("q ** -1 > kv", "`pow` with the exponent -1"),
        ("torch.round(t0[q], decimals=2) > 1", "`round` with decimals"),
        ("(q > 3, kv > 3)", "the result"),
        ("t0[q, kv] > 3", "a graph: RuntimeError: too many indices"),
    ],
)  # fmt: skip
def test_what_there_is_no_kernel_of(text, unknown, no_flags, monkeypatch, caplog):
    """Tensor operations evaluate it, and the log says why; once."""
    case = text_case(text, [torch.arange(150).float()])
    monkeypatch.setattr(mask_bits, "on_device", contextlib.nullcontext)
    with caplog.at_level("INFO", logger="magi_compile"):
        for _ in range(2):
            assert mask_bits.mask_bits_on_device(*case, None, CPU) is None
    (record,) = (x for x in caplog.records if unknown in x.getMessage())
    assert "is evaluated by tensor operations: there is no kernel of" in record.getMessage()


def test_nothing_to_see(no_flags):
    case = text_case("q >= kv", [], sizes=MaskSizes(2, 0, 9))
    _, prepared = mask_bits.prepare(*case, None, CPU)
    assert prepared.call.launches == ()


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_on_the_gpu(name):
    case, device = case_named(name), torch.device("cuda", torch.cuda.current_device())
    wanted = None if name.startswith("wrong") else by_tensors(case)
    tables = [table.to(device) for table in case.tables]
    made = mask_bits.mask_bits_on_device(
        case.program, tables, case.symbols, case.sizes, None, device
    )
    assert made is not None
    if wanted is None:
        with pytest.raises(MaskDataError):
            _checks.synchronize_checks()
        return
    q_ranges, k_ranges, mask_types, bits = (x.cpu() for x in made)
    assert_same(
        AttnSlices.unchecked(q_ranges, k_ranges, mask_types, *case.sizes.totals, bits), wanted
    )
    _checks.synchronize_checks()
