"""Mask programs by one CUDA source give what tensor operations give: compiled for the CPU here, as it is on a GPU."""

import ctypes
import random
from functools import cache, partial
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile import MaskDataError, _checks
from magi_compile.kernels.sm90.masks import mask_slices
from magi_compile.kernels.sm90.masks.source import mask_source
from magi_compile.kernels.sm90.runtime import calls, nvrtc
from magi_compile.masks import (
    MaskProgram,
    UnsupportedMaskError,
    library,
    padded_slices_from_intervals,
    row_intervals,
    trace_mask_mod,
)
from magi_compile.masks.evaluation.evaluate import with_columns
from magi_compile.masks.evaluation.row_intervals import RowIntervals
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from tests.kernels.support.cpp import compile_library
from tests.masks.support.mask_mods import MASK_MODS
from tests.masks.support.random_masks import random_mask, tables_for

CPU = torch.device("cpu")


class Case(NamedTuple):
    program: MaskProgram
    tables: list[torch.Tensor]
    symbols: list[int]
    sizes: MaskSizes
    capacity: int


def library_cases():
    for name, lengths in (("short", [5, 1, 40, 17]), ("long", [300, 1, 2, 129, 200])):
        for mask in library.MASKS:
            yield f"{mask}-{name}", partial(library_case, mask, lengths)


def library_case(mask, lengths):
    make = library.MASKS[mask]
    options = {"window": 37, "block": 16, "tile": 7, "width": 4, "height": 3}
    options = {k: v for k, v in options.items() if k in make.__kwdefaults__}
    program, tables, _ = trace_mask_mod(make(lengths, **options).mask_mod)
    total = sum(lengths)
    return Case(program, tables, [], MaskSizes(1, total, total), 300)


def mask_mod_cases():
    for name in MASK_MODS:
        yield name, partial(mask_mod_case, name)


def mask_mod_case(name):
    program, tables, _ = trace_mask_mod(MASK_MODS[name](2, 130, 97))
    return Case(program, tables, [], MaskSizes(2, 130, 97), 600)


def random_cases(by_head=False):
    """Masks whose data may break what they rely on."""
    name = "of_heads" if by_head else "random"
    for i in range(20):
        yield f"{name}{i}", lambda i=i: random_masks(by_head)[i]


@cache
def random_masks(by_head):
    generator, found = random.Random(0), []
    while len(found) < 20:
        program = MaskProgram.parse(random_mask(generator, generator.randint(1, 5), by_head))
        sizes = MaskSizes(*(generator.randint(1, most) for most in (2, 40, 40)))
        if by_head:
            heads = Heads(*generator.choice([(2, 1), (4, 2), (3, 3), (1, 1)]))
            sizes = sizes._replace(heads=heads)
            if not program.differs_by_head:
                continue
        try:
            program.keys(sizes.seqlen_k, [3])
        except UnsupportedMaskError:
            continue
        seed, heads = generator.randint(0, 9), sizes.heads.q if by_head else 0
        tables = tables_for(sizes.batch, max(sizes[1:3]), seed, heads)
        found.append(Case(program, tables, [3], sizes, 400 if by_head else 50))
    return found


def cases_by_head():
    """Indexes of batch entries, of heads, of both and of neither; data that break a promise in one head alone."""
    yield from random_cases(by_head=True)
    sizes = MaskSizes(2, 40, 33, Heads(4, 2))
    ids = torch.arange(40) // 7
    of_heads = torch.stack([torch.arange(40) // n for n in (3, 40, 9, 5)])
    broken = of_heads.clone()
    broken[2, 4] = 3
    both = of_heads + torch.tensor([0, 50])[:, None, None]
    window = torch.tensor([3, 0, 12, 50])
    for name, text, tables in (
        ("window", "(q >= kv) & (q - kv <= t0[h])", [window]),
        ("no_index", "(t0[q] == t0[kv]) & (abs(q - kv) <= t1[h])", [ids, window]),
        ("of_batch", "(t0[b, q] == t0[b, kv]) & (kv <= q + h)", [torch.stack([ids, ids // 2])]),
        ("of_heads", "t0[h, q] == t0[h, kv]", [of_heads]),
        ("of_both", "(t0[b, h, q] == t0[b, h, kv]) | (t1[q] == t1[kv])", [both, ids]),
        ("several", "((t0[h, q] == t0[h, kv]) | (t1[q] == t1[kv])) & (t2[b, kv] <= h)", [of_heads, ids, both[:, 1]]),
        ("broken", "t0[h, q] == t0[h, kv]", [broken]),
        ("unsorted", "t0[h, kv] <= q", [broken]),
        ("outside", "kv <= t0[h + 1]", [window]),
        ("by_zero", "kv // t0[h] <= 3", [window]),
        ("a_gap", "(t0[h, kv] != 3) & (q >= kv)", [broken]),
        ("of_keys", "t0[t1[h, kv]] <= q", [ids[:20], of_heads * 2]),
    ):  # fmt: skip
        yield f"by_head_{name}", partial(parsed, text, tables, sizes, 200)


def table_cases():
    """Tables of every dtype, strided, looked up at computed places, and such that break promises."""
    ids = torch.tensor([0, 0, 1, 1, 1, 5])
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        yield f"{dtype}", partial(parsed, "t0[q] == t0[kv]", [ids.to(dtype)], MaskSizes(2, 6, 6), 9)
    for number, (text, table) in enumerate(
        (
            ("t0[b, q] - 1 <= t0[b, kv]", torch.arange(24).view(3, 8)[::2, 1::1]),
            ("t0[b, q] == t0[b, kv]", torch.arange(24).view(8, 3).T[:2]),
            ("t0[kv] * 2 <= t0[q] * 2", ids + 2**31 - 6),
            ("t0[kv] - t0[q] * 2 <= 7 - t0[q]", ids * 2**60),
            ("t0[-q - 1] % 3 >= kv", ids),
            ("(q - 9) // t0[b] >= (kv - 9) // t0[b]", torch.tensor([4, -1])),
            ("q // t0[b] >= kv", torch.tensor([4, 0])),
            ("q % t0[q] >= kv", torch.tensor([4, 2, 0, -3, 0, 1])),
            ("kv < t0[t0[q]]", torch.tensor([0, 1, 2, 3, 4, 6])),
            ("kv < t0[t0[q] - 9]", torch.tensor([0, 1, 2, 3, 4, 6])),
            ("t0[q] == t0[kv]", torch.tensor([5, 5, 7, 5, 8, 8])),
            ("(t0[q] == t0[kv]) & (q == 4)", torch.tensor([0, 0, 1, 0, 0, 1])),
            ("t0[b, q] != t0[b, kv]", torch.tensor([[5, 5, 7, 7, 8, 8], [1, 2, 1, 4, 5, 6]])),
            ("(t0[q] == t0[kv]) & (t0[q] > 0)", torch.tensor([1, 0, 2, 0, 3, 3])),
            ("t0[kv] <= q", torch.tensor([0, 1, 2, 1, 3, 4])),
            ("t0[b, kv] > t0[b, q]", torch.tensor([[0, 1, 2, 3, 3, 4], [0, 0, 0, 0, 2, 1]])),
            ("(q >= 9) & (t0[kv] <= q)", torch.tensor([3, 2, 1, 0, 0, 0])),
            ("(t0[kv] == 1) & (q >= kv)", torch.tensor([1, 1, 0, 0, 1, 0])),
            ("t0[t0[kv]] <= q", torch.tensor([0, 1, 2, 3, 4, 6])),
            ("t0[kv // t0[0]] <= q", torch.tensor([0, 1, 2, 3, 4, 6])),
            ("(abs(q - kv) <= t0) | (kv <= 9223372036854775807)", torch.tensor(2)),
            ("q * 9223372036854775808 > kv", torch.tensor(2)),
            ("(q >= kv) & (kv <= t0[q])", torch.tensor([2, 2**63 - 1, 0, -(2**63), 5, 1])),
            ("abs(q - kv) <= t0[q]", torch.tensor([2, 2**63 - 1, 0, -(2**63), 5, 1])),
            (
                "(q - kv >= t0[q]) | (kv // 2 <= t0[q])",
                torch.tensor([2, 2**63 - 1, 0, -(2**63), 5, 1]),
            ),
            (
                "(kv > t0[q]) & (q - kv < t0[q] * 3)",
                torch.tensor([2, 2**63 - 1, 0, 1 - 2**63, 5, 1]),
            ),
        )
    ):
        yield f"table{number}", partial(parsed, text, [table], MaskSizes(2, 6, 6), 20)
    few = MaskSizes(1, 20, 20), 3
    yield "no_room", partial(parsed, "(q % 2 == 0) & (q >= kv)", [], *few)
    yield "symbols", partial(parsed, "abs(q - kv) <= s1 * s0", [], *few, [3, -2])


def parsed(text, tables, sizes, capacity, symbols=()):
    return Case(MaskProgram.parse(text), tables, [*symbols], sizes, capacity)


# Made when a test asks for them: workers that never do have their names alone.
CASES = dict(
    (
        *library_cases(),
        *mask_mod_cases(),
        *random_cases(),
        *table_cases(),
        *cases_by_head(),
    )
)


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


MAIN = """
#include "masks/mask_slices.cuh"
{masks}
extern "C" void run(int mask, const char* params) {{
    const auto& fixed = *reinterpret_cast<const ffa::MaskSlicesParams*>(params);
    const auto* words = reinterpret_cast<const ffa::Int*>(params + sizeof(fixed));
    switch (mask) {{
    {cases}
    }}
}}
"""


def source_of(case):
    keys = case.program.keys(case.sizes.seqlen_k, case.symbols)
    tables = with_columns(case.program, case.tables, case.symbols, case.sizes, CPU)
    return mask_source(case.program, keys, tuple(table.dtype for table in tables))


@pytest.fixture(scope="module")
def run_on_host(tmp_path_factory):
    """The kernel's source behind a header that knows one thread, for all masks at once."""
    numbers: dict[str, int] = {}
    for name in CASES:
        source = source_of(case_of(name))
        numbers.setdefault(source.text, len(numbers))
    masks = (text.replace("struct Mask ", f"struct Mask{i} ") for text, i in numbers.items())
    cases = (
        f"case {i}: return ffa::MaskSlices<ffa::Mask{i}>(fixed, words).run();"
        for i in numbers.values()
    )
    main = MAIN.format(masks="\n".join(masks), cases="\n".join(cases))
    traps = "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero"
    options, replaced = f"-O0 -fno-sanitize-recover {traps}", {"common/block.cuh": "one_thread.cuh"}
    kernel = compile_library(tmp_path_factory, main, options, replaced).run

    def run(case: Case) -> OnHost:
        given, prepared = mask_slices.prepare(*case, CPU)
        found = OnHost.of(prepared)
        addresses = calls.addresses_of([*given, *found.made])
        for launch in prepared.call.launches:
            params = launch.params_at(addresses)
            kernel(numbers[prepared.source.text], (ctypes.c_char * len(params)).from_buffer(params))
        return found

    return run


class OnHost(NamedTuple):
    """What a call made."""

    lists: list[torch.Tensor]
    intervals: RowIntervals
    made: list[torch.Tensor]

    @staticmethod
    def of(prepared: mask_slices.SlicesCall) -> "OnHost":
        """With memory in which what nobody writes is seen."""
        made = [torch.full(x.shape, -1, dtype=x.dtype) for x in prepared.call.made]
        for tensor, buffer in zip(made, prepared.call.made, strict=True):
            tensor.view(-1)[: buffer.zeros] = 0
        return OnHost(made[:3], prepared.intervals(made[3]), made)


def by_tensors(case: Case, device: torch.device = CPU):
    sizes = case.sizes._asdict()
    intervals = row_intervals(case.program, case.tables, case.symbols, **sizes, device=device)
    slices, fits = padded_slices_from_intervals(intervals, case.capacity)
    return slices, intervals, [*intervals.checks, fits]


def failures(checks) -> dict[str, set[str]]:
    """What each failed check may say: those with one message share a flag."""
    said: dict[str, set[str]] = {}
    for check in checks:
        if not check.ok:
            found = check.detail.format(*(int(value) for value in check.values))
            said.setdefault(check.message, set()).add(f"{check.message}, but {found}")
    return said


def assert_same(case: Case, lists, intervals: RowIntervals | None = None):
    slices, expected, checks = by_tensors(case)
    said = failures(checks)
    if not said:
        _checks.synchronize_checks()
        if intervals is not None:
            assert torch.equal(intervals.lo, expected.lo)
            assert torch.equal(intervals.hi, expected.hi)
        for actual, wanted in zip(lists, slices.lists, strict=True):
            assert torch.equal(actual.cpu(), wanted)
        return
    with pytest.raises(MaskDataError) as error:
        _checks.synchronize_checks()
    reports = str(error.value).partition(_checks.FOR_ANY_DATA)[0].split("; ")
    assert len(reports) == len(said)
    assert all(any(report in each for each in said.values()) for report in reports)
    assert not any(actual.any() for actual in lists)


@pytest.mark.parametrize("name", CASES)
def test_the_source_on_the_host(name, run_on_host, no_flags):
    found = run_on_host(case_of(name))
    assert_same(case_of(name), found.lists, found.intervals)


@pytest.mark.parametrize(
    "name", ["halves", "prefix_lm_document", "packed_positions", "table0", "by_head_several"]
)
def test_compiles(name):
    case = case_of(name)
    source = source_of(case)
    cubin, log = nvrtc.run_nvrtc(mask_slices.mask_variant(source))
    assert cubin.startswith(b"\x7fELF")
    assert nvrtc.parse_resources(log).spilled_bytes == 0


def test_a_change_of_data_compiles_nothing(no_flags, monkeypatch):
    """Only what is computed is in the source: no size, no captured int, no shape, no name."""
    sources = set()
    for names, symbol, size in (("", 3, 20), ("  # t0: document", 5, 33)):
        program = MaskProgram.parse(f"(t0[q // s0] == t0[kv // s0]) & (q >= kv){names}")
        case = Case(program, [torch.arange(size)], [symbol], MaskSizes(1, size, size + 1), 2 * size)
        _, prepared = mask_slices.prepare(*case, CPU)
        sources |= {launch.function for launch in prepared.call.launches}
    assert len(sources) == 1


@pytest.mark.parametrize("sizes", [(0, 6, 6), (2, 0, 6), (2, 6, 0)], ids=str)
def test_nothing_to_see(sizes, no_flags):
    case = parsed("t0[q] == t0[kv]", [torch.zeros(0).int()], MaskSizes(*sizes), 9)
    _, prepared = mask_slices.prepare(*case, CPU)
    assert prepared.call.launches == ()
    found = OnHost.of(prepared)
    assert_same(case, found.lists, found.intervals)


@pytest.mark.parametrize(
    ("text", "tables", "error", "message"),
    [
        ("t0[q] < t1[kv]", [torch.zeros(6).long()], ValueError, "`tables` must hold 2 tensors, got 1"),
        ("t0[q]", [torch.arange(6)], TypeError, r"`t0\[q\]` must be bool where it is a truth value, got integers"),
        ("t0[kv]", [torch.arange(6)], TypeError, r"`t0\[kv\]` must be bool where"),
        ("where(t0[q], kv, q) < 3", [torch.arange(6)], TypeError, r"`t0\[q\]` must be bool where"),
        ("where(t0[q], t0[kv] <= q, kv < 3)", [torch.arange(6)], TypeError, r"`t0\[q\]` must be bool where"),
        ("q // s0 > kv", [], ValueError, "`s0` must not be zero, it divides"),
        ("q < s1", [], ValueError, "`symbols` must hold 2 ints, got 1"),
        ("t0[q] < 3", [torch.zeros(6)], TypeError, "`t0` must hold ints or bools, got torch.float32"),
        ("t0[q] < 3", [torch.zeros(1, 6).long()], ValueError, "must have 1 dimensions, got 2"),
        ("t0[q] < 3", [torch.zeros(5).long()], ValueError, "must have at least 6 entries in dimension 0, got 5"),
        ("t0[q // 2] < 3", [torch.zeros(0).long()], ValueError, "looks up a captured tensor without entries"),
    ],
)  # fmt: skip
def test_wrong_arguments(text, tables, error, message, no_flags):
    program, symbols = MaskProgram.parse(text), [9] if "s0 * " in text else [0]
    with pytest.raises(error, match=message):
        mask_slices.prepare(program, tables, symbols, MaskSizes(2, 6, 6), 9, CPU)


def test_capacity_and_lengths_must_be_in_range(no_flags):
    program = MaskProgram.parse("q >= kv")
    with pytest.raises(ValueError, match="`capacity` must not be negative, got -1"):
        mask_slices.prepare(program, [], [], MaskSizes(1, 6, 6), -1, CPU)
    with pytest.raises(ValueError, match=r"`batch \* seqlen_q` must be below 2\*\*30"):
        mask_slices.prepare(program, [], [], MaskSizes(1024, 2**20, 6), 9, CPU)


def on_gpu(case: Case):
    device = torch.device("cuda", torch.cuda.current_device())
    tables = [table.to(device) for table in case.tables]
    return mask_slices.mask_slices_on_device(*case._replace(tables=tables), device).lists


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    assert_same(case_of(name), on_gpu(case_of(name)))


@pytest.mark.gpu
@pytest.mark.parametrize("average", [40, 4000])
def test_a_million_tokens(average):
    total = 1 << 20
    document = (torch.rand(total) < 1 / average).cumsum(0)
    document = torch.randperm(total + 1)[document]  # not in the order of the keys
    program = MaskProgram.parse("(t0[q] == t0[kv]) & (q >= kv) & (q - kv < 1000)")
    case = Case(program, [document], [], MaskSizes(1, total, total), total // 4)
    assert_same(case, on_gpu(case))


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """Captured once, replayed with other data; a broken promise is seen then."""
    program = MaskProgram.parse("(t0[q] == t0[kv]) & (q >= kv)")
    document = torch.zeros(500, dtype=torch.int64, device="cuda")
    case = Case(program, [document], [], MaskSizes(1, 500, 500), 20)
    on_gpu(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = on_gpu(case)
    for average in (100, 200, 500):
        document.copy_(torch.arange(500) // average)
        graph.replay()
        _checks.synchronize_checks()
        slices, _, _ = by_tensors(case._replace(tables=[document.cpu()]))
        assert torch.equal(lists[0].cpu(), slices.q_ranges)
        assert torch.equal(lists[1].cpu(), slices.k_ranges)
    document.copy_(torch.arange(500) // 100 % 2)
    graph.replay()
    with pytest.raises(
        MaskDataError, match="the value 0 that row q = 200 of batch entry 0 looks up"
    ):
        _checks.synchronize_checks()
    assert not any(each.any() for each in lists)
