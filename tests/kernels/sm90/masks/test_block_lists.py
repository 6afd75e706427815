"""Block lists against a mask by one kernel find what tensor operations find: compiled for the CPU here."""

import ctypes

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile import MaskDataError, _checks
from magi_compile.kernels.sm90.masks import mask_slices
from magi_compile.kernels.sm90.masks.mask_slices import lists_variant
from magi_compile.kernels.sm90.runtime import calls
from magi_compile.masks import MaskProgram, row_intervals
from magi_compile.masks.evaluation.block_lists import BlockLists, visible_blocks
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from tests.kernels.support.cpp import compile_library

CPU = torch.device("cpu")
MAIN = """
#include "masks/block_lists.cu"
extern "C" void run(const char* params, int block, int num_blocks) {
    static ffa::Shared shared;
    blockIdx.x = block;
    ffa::BlockLists(*reinterpret_cast<const ffa::BlockListsParams*>(params), shared).run(num_blocks);
}
"""
CAUSAL = "q >= kv"
TWO_PIECES = "(kv < 40) | ((q >= kv) & (kv > 70))"
BY_HEAD = "(q >= kv) & (q - kv < 7 + 40 * h)"
# The program, batch, seqlen_q, seqlen_k, rows and keys of a block, and how many heads have masks of their own.
MASKS = {
    "causal": (CAUSAL, 1, 300, 300, 128, 128),
    "small_blocks": (CAUSAL, 2, 130, 97, 16, 8),
    "uneven_blocks": ("(q + 5 >= kv) & (q - kv < 33)", 2, 130, 200, 32, 64),
    "two_pieces": (TWO_PIECES, 1, 130, 130, 16, 16),
    "nothing": ("q < 0", 1, 64, 64, 16, 16),
    "everything": ("kv >= 0", 2, 50, 70, 16, 16),
    "by_head": (BY_HEAD, 2, 130, 97, 16, 8, 3),
    "blocks_by_head": ("(h == 1) | (q >= kv)", 1, 300, 200, 128, 32, 3),
    "many_keys": ("(q * 40 >= kv) | (kv > 4600)", 1, 128, 5000, 64, 2),
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    replaced = {"common/block.cuh": "one_thread.cuh"}
    traps = "-fsanitize=signed-integer-overflow,shift,integer-divide-by-zero"
    options = f"-O1 -fno-sanitize-recover {traps}"
    return compile_library(tmp_path_factory, MAIN, options, replaced).run


def intervals_of(mask):
    program, *block_size = mask[0], *mask[4:6]
    sizes = sizes_of(mask)._asdict()
    return row_intervals(MaskProgram.parse(program), [], [], **sizes, device=CPU), block_size


def sizes_of(mask):
    return MaskSizes(*mask[1:4], Heads(*mask[6:]))


def of_lists(x, heads):
    """What is visible in blocks as lists of `heads`, or of those whose masks differ."""
    return x.repeat(1, heads, 1, 1) if x.shape[1] == 1 else x


def listed(grid):
    """The list of a grid of blocks, bool `[batch, heads, q blocks, kv blocks]`, with nonsense behind its ends."""
    counts, order = grid.sum(-1), grid.int().argsort(dim=-1, descending=True, stable=True)
    behind = torch.arange(grid.shape[-1]) >= counts[..., None]
    order[behind] = torch.randint(-(2**31), 2**31, (int(behind.sum()),))
    return counts.int(), order.int()


def right_lists(mask, heads=1, batch=None):
    """The lists that `create_block_mask` would make."""
    intervals, block_size = intervals_of(mask)
    seen, full = (of_lists(x, heads) for x in visible_blocks(intervals, *block_size))
    return listed((seen & ~full)[:batch]), listed(full[:batch])


def run_on_host(kernel, mask, lists):
    """The slices, which are ones at first, and the checks of tensor operations."""
    intervals, block_size = intervals_of(mask)
    arguments = (MaskProgram.parse(mask[0]), [], [], sizes_of(mask), 5, CPU)
    given, prepared = mask_slices.prepare(*arguments, lists, tuple(block_size))
    *_, launch = prepared.call.launches
    assert launch.function == lists_variant()
    made = [torch.ones(x.shape, dtype=x.dtype) for x in prepared.call.made]
    made[3][: prepared.call.made[3].zeros] = 0
    found = prepared.intervals(made[3])
    found.lo.copy_(intervals.lo)
    found.hi.copy_(intervals.hi)
    params = launch.params_at(calls.addresses_of([*given, *made]))
    for block in torch.randperm(launch.grid).tolist():
        kernel((ctypes.c_char * len(params)).from_buffer(params), block, launch.grid)
    return made[:3], lists.checks(intervals, *block_size)


def assert_reported(slices, checks):
    """What fails is what a MaskDataError says, and then no slice is left. Returns whether all holds."""
    said = [f"{x.message}, but {x.detail.format(*map(int, x.values))}" for x in checks if not x.ok]
    if not said:
        _checks.synchronize_checks()
        return True
    with pytest.raises(MaskDataError) as error:
        _checks.synchronize_checks()
    assert str(error.value).removesuffix(_checks.FOR_ANY_DATA) == "; ".join(said)
    assert not any(x.any() for x in slices)
    return False


def assert_same(slices, checks):
    if assert_reported(slices, checks):
        assert all(x.all() for x in slices)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", [1, 3])
def test_lists_of_the_mask(mask, heads, kernel, no_flags):
    partial, full = right_lists(mask, heads)
    slices, checks = run_on_host(kernel, mask, BlockLists(*partial, *full))
    assert all(x.ok for x in checks)
    assert_same(slices, checks)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("seed", range(6))
def test_other_lists(mask, seed, kernel, no_flags):
    """A few blocks are missing, or called full; by one head or by all, of one batch entry or of all;
    or all are partial."""
    torch.manual_seed(seed)
    heads = 1 + seed % 2 * 2
    intervals, block_size = intervals_of(mask)
    seen, full = (of_lists(x, heads) for x in visible_blocks(intervals, *block_size))
    changed = torch.rand(seen.shape) < 2 / seen.numel()
    partial = seen if seed % 3 == 0 else seen & ~full
    partial = partial & ~changed
    if seed % 3 == 1:
        full = full | changed
    if seed % 3 == 0:
        lists = BlockLists(*listed(partial))
    else:
        lists = BlockLists(*listed(partial), *listed(full))
    assert_same(*run_on_host(kernel, mask, lists))


def test_one_head_of_full_blocks_for_many_of_partial_ones(kernel, no_flags):
    mask = MASKS["uneven_blocks"]
    partial, _ = right_lists(mask, heads=3)
    _, full = right_lists(mask)
    assert_same(*run_on_host(kernel, mask, BlockLists(*partial, *full)))


def test_lists_of_one_batch_entry_transposed_and_longer_than_the_mask(kernel, no_flags):
    mask = MASKS["small_blocks"]
    (counts, indices), full = right_lists(mask, batch=1)
    counts = torch.nn.functional.pad(counts, (0, 3))
    indices = torch.nn.functional.pad(indices, (0, 4, 0, 3)).mT.contiguous().mT
    assert indices.stride(-1) != 1
    slices, checks = run_on_host(kernel, mask, BlockLists(counts, indices.long(), *full))
    assert all(x.ok for x in checks)
    assert_same(slices, checks)


def test_counts_of_each_head_and_indices_of_all(kernel, no_flags):
    mask = MASKS["uneven_blocks"]
    (counts, indices), full = right_lists(mask)
    lists = BlockLists(counts.expand(-1, 3, -1), indices, *full)
    slices, checks = run_on_host(kernel, mask, lists)
    assert all(x.ok for x in checks)
    assert_same(slices, checks)


def test_lists_of_one_head_under_masks_by_head(kernel, no_flags):
    """They hold what any head sees; what one of them hides is not full."""
    mask = MASKS["blocks_by_head"]
    intervals, block_size = intervals_of(mask)
    seen, full = visible_blocks(intervals, *block_size)
    for partial, whole in (
        (seen.any(1), full.all(1)),
        (seen[:, 0], full[:, 0]),
        (seen.any(1), full.any(1)),
    ):
        lists = BlockLists(*listed((partial & ~whole)[:, None]), *listed(whole[:, None]))
        slices, checks = run_on_host(kernel, mask, lists)
        assert_same(slices, checks)
        assert all(x.ok for x in checks) == bool(partial.all() and not whole.all())


def test_what_is_wrong_with_the_mask_itself_is_reported_alone(kernel, no_flags):
    """The intervals mean nothing then."""
    program = MaskProgram.parse("t0[q] == t0[kv]")
    lists = BlockLists(torch.zeros(1, 1, 4).int(), torch.zeros(1, 1, 4, 4).int())
    sizes = MaskSizes(1, 64, 64)
    given, prepared = mask_slices.prepare(
        program, [torch.arange(64)], [], sizes, 5, CPU, lists, (16, 16)
    )
    made = [torch.ones(x.shape, dtype=x.dtype) for x in prepared.call.made]
    made[3][prepared.workspace.found : prepared.workspace.intervals] = 0
    params = prepared.call.launches[-1].params_at(calls.addresses_of([*given, *made]))
    for block in range(4):
        kernel((ctypes.c_char * len(params)).from_buffer(params), block, 4)
    _checks.synchronize_checks()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 1, 3), (1, 1, 4, 4)), r"`block_mask.kv_num_blocks` must cover 4 q blocks, got 3"),
        (
            ((3, 1, 4), (3, 1, 4, 4)),
            r"must have lists of 1 or 2 batch entries on cpu, got 3 on cpu",
        ),
    ],
)
def test_wrong_lists(shapes, message, no_flags):
    lists = BlockLists(*(torch.zeros(x).int() for x in shapes))
    arguments = (MaskProgram.parse(CAUSAL), [], [], MaskSizes(2, 64, 64), 5, CPU)
    with pytest.raises(ValueError, match=message):
        mask_slices.prepare(*arguments, lists, (16, 16))


def test_lists_of_other_heads_than_the_mask_has(no_flags):
    mask = MASKS["by_head"]
    lists = BlockLists(torch.zeros(1, 2, 9).int(), torch.zeros(1, 2, 9, 13).int())
    arguments = (MaskProgram.parse(mask[0]), [], [], sizes_of(mask), 5, CPU)
    with pytest.raises(ValueError, match="must have lists of 1 or 3 heads, got 2"):
        mask_slices.prepare(*arguments, lists, (16, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("seed", range(3))
def test_on_the_gpu(mask, seed):
    torch.manual_seed(seed)
    intervals, block_size = intervals_of(mask)
    seen, full = (of_lists(x, 2) for x in visible_blocks(intervals, *block_size))
    changed = (torch.rand(seen.shape) < 2 / seen.numel()) & (seed > 0)
    lists = BlockLists(*listed(seen & ~full & ~changed), *listed(full | (changed & ~seen)))
    device = torch.device("cuda", torch.cuda.current_device())
    on_device = BlockLists(*(x.to(device) for x in lists))
    program, sizes = MaskProgram.parse(mask[0]), sizes_of(mask)
    found = mask_slices.mask_slices_on_device(
        program, [], [], sizes, 700, device, on_device, tuple(block_size)
    )
    if assert_reported(found.lists, lists.checks(intervals, *block_size)):
        assert found.lists[0].any() == seen.any()
