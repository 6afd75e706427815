"""Programs for test_native.py: `python -m tests.kernels.support.launcher_program DRIVER NAME`."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import traceback
from dataclasses import replace

import pytest
import torch

from magi_compile import _checks
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.plan import pack
from magi_compile.kernels.select import MaskKernel
from magi_compile.kernels.sm90.kernel import HopperKernel
from magi_compile.kernels.sm90.masks.mask_bits import mask_bits_on_device
from magi_compile.kernels.sm90.masks.mask_slices import mask_slices_on_device
from magi_compile.kernels.sm90.params import (
    BACKWARD,
    BLOCK_LISTS,
    BLOCK_MAP,
    FORWARD,
    MASK_SLICES,
    TILE_PLAN,
    mask_mod_params,
    mask_program_params,
    params_of,
)
from magi_compile.kernels.sm90.planner import tile_plan as planner
from magi_compile.kernels.sm90.runtime import launcher_build, native
from magi_compile.masks.evaluation import verify
from magi_compile.masks.slices import AttnSlices
from magi_compile.ops import library
from magi_compile.ops.masks import mask_bits as mask_bits_op
from magi_compile.ops.masks import mask_slices as mask_slices_op
from magi_compile.ops.masks import plan_lists as plan_lists_op
from magi_compile.ops.repeatable import REPEATABLE
from tests.kernels.support import idle_driver
from tests.kernels.support.bits import bit_slices

PROBLEM = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 64, 64, 0.125)
ROWS = 300


class SetAttributes:
    setattr = staticmethod(setattr)


class PlanningKernel(HopperKernel):
    """Plans slices of a CPU as those of a GPU."""

    def plan(self, slices, problem):
        return planner.plan_on_device(slices, plan_tiles(problem), problem)


class LaunchRecord(ctypes.Structure):
    """As in idle_driver.c."""

    _fields_ = [
        ("function", ctypes.c_uint64),
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("num_attributes", ctypes.c_uint),
        ("num_bytes", ctypes.c_uint),
        ("params", ctypes.c_ubyte * 4096),
    ]


class Setup:
    """Attention ops on a CPU that think it is a Hopper GPU; what Python launches, and what the launcher does."""

    def __init__(self, driver: str):
        self.python: list[tuple] = []
        idle_driver.fake_hopper(
            SetAttributes,
            num_sms=132,
            load_function=lambda variant, device: 1000 + len(variant.source),
            launch=self._launch,
            encode=lambda tensor_map, address: idle_driver.address_map(address),
        )
        native.current_context = lambda: 7
        library.chosen_for = lambda device, dtype, heads, scale, softcap, name, **others: (
            library.Chosen(
                PlanningKernel(),
                replace(PROBLEM, softmax_scale=scale, softcap=softcap, **others),
            )
        )
        for module in (library, mask_slices_op, mask_bits_op, plan_lists_op):
            module.hand_over_to_launcher = lambda: None
        mask_slices_op.mask_slices_kernel = lambda arch: MaskKernel(mask_slices_on_device, None)
        mask_bits_op.mask_bits_kernel = lambda arch: MaskKernel(mask_bits_on_device, None)
        self.driver = ctypes.CDLL(driver)
        self.driver.get.restype = ctypes.POINTER(LaunchRecord)
        self.launcher = native.Launcher(launcher_build.build(), driver)
        native.launcher = lambda: self.launcher

    def hand_over(self) -> None:
        for name, how in REPEATABLE.items():
            key = "CPU" if how.dispatch_key == "CUDA" else how.dispatch_key
            self.launcher.register(name, how.arguments, how.results, key)

    def _launch(self, function, grid, block, params, stream, options):
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        shared_bytes, may_start_early, cluster, is_cooperative = options
        attributes = may_start_early + (cluster > 1) + is_cooperative
        self.python.append((function, x, y, block, shared_bytes, attributes, bytes(params)))
        self.driver.expect(len(self.python) - 1, len(params))

    def repeated(self) -> list[tuple]:
        found = [self.driver.get(i).contents for i in range(self.driver.count())]
        self.driver.clear()
        return [
            (
                *(x.function, x.grid_x, x.grid_y, x.block, x.shared_bytes, x.num_attributes),
                bytes(x.params[: x.num_bytes]),
            )
            for x in found
        ]

    def in_python(self) -> list[tuple]:
        found, self.python = self.python, []
        return found


def plan_of(slices, problem=PROBLEM):
    kernel = HopperKernel()
    return pack(kernel.plan(slices, problem))


def tensors(rows=ROWS):
    return [torch.randn(rows, heads, 64).bfloat16() for heads in (4, 2, 2)]


def lists(slices):
    return [slices.q_ranges, slices.k_ranges, slices.mask_types]


def addresses_out(params: bytes, known: dict[int, str]) -> bytes:
    """Parameters with names in place of addresses of tensors that only one of two calls has."""
    for address, name in known.items():
        params = params.replace(address.to_bytes(8, "little"), name.encode().ljust(8)[:8])
    return params


def same_launches(setup: Setup) -> None:
    """The forward and the backward, with and without a gradient of lse, in Python and then repeated,
    with other tensors."""
    slices = AttnSlices.from_cu_seqlens(
        torch.tensor([0, 100, ROWS], dtype=torch.int32), causal=True
    )
    plan = plan_of(slices)
    for dlse in (None, torch.randn(4, ROWS)):
        setup.launcher.forget()
        seen = []
        for _ in range(2):
            q, k, v = tensors()
            out, lse, _ = torch.ops.magi.ffa_fwd(q, k, v, lists(slices), plan, 0.125, 0.0, "")
            dout = torch.randn_like(out)
            args = (dout, dlse, q, k, v, out, lse, lists(slices), plan, 0.125, 0.0, "", False)
            grads = torch.ops.magi.ffa_bwd(*args)
            named = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout)
            named |= dict(zip(("dq", "dk", "dv"), grads[:3], strict=True))
            known = {x.data_ptr(): f"<{name}>" for name, x in named.items()}
            launched = setup.in_python() or setup.repeated()
            seen.append([(*x, addresses_out(params, known)) for *x, params in launched])
            shapes = [(x.shape, x.stride(), x.dtype) for x in named.values()]
            seen[-1].append(shapes)
        first, second = seen
        assert len(first) == len(second) >= 5
        for one, other in zip(first[:-1], second[:-1], strict=True):
            assert one[:-1] == other[:-1]
            # What is left of differences are addresses of scratch memory, the same offsets into other blocks.
            words = [memoryview(x[-1]).cast("Q") for x in (one, other)]
            differ = [(a, b) for a, b in zip(*words, strict=True) if a != b]
            assert len({a - b for a, b in differ}) <= 2
        assert first[-1] == second[-1]


def masks(setup: Setup) -> None:
    """The slices of a mask, with captured tensors and block lists or without any tensor, and their plan."""
    text = "(q >= kv) & (t0[q] == t0[kv])"
    verify._verified.update((text, "q >= kv"))
    sizes = (1, ROWS, ROWS, 20, torch.device("cpu"))

    def block_lists():
        return [torch.zeros(1, 1, 3).int(), torch.zeros(1, 1, 3, 3).int()]

    found = []
    for _ in range(2):
        document, blocks = torch.zeros(ROWS).long(), block_lists()
        lists = torch.ops.magi.mask_slices([document], [], text, *sizes, blocks, [128, 128])
        assert [x.shape for x in lists] == [(20, 2), (20, 2), (20,)]
        found.append((document, blocks, lists, setup.in_python(), setup.repeated()))
    (*_, by_python, repeated), (*_, by_python_again, repeated_again) = found
    assert (len(by_python), len(repeated)) == (2, 0)
    assert (len(by_python_again), len(repeated_again)) == (0, 2)
    assert [x[:-1] for x in by_python] == [x[:-1] for x in repeated_again]
    for (document, blocks, lists, *_), launched in zip(
        found, (by_python, repeated_again), strict=True
    ):
        of_program, of_lists = (params for *_, params in launched)
        num_words = (len(of_program) - MASK_SLICES.size) // 8
        field = idle_driver.fields(mask_program_params(num_words), of_program)
        assert field["words[0]"] == document.data_ptr()
        assert field["fixed.mask_types"] == lists[2].data_ptr()
        assert field["fixed.num_arrived"] == field["fixed.intervals"] - 4
        field = idle_driver.fields(BLOCK_LISTS, of_lists)
        assert field["partial.indices"] == blocks[1].data_ptr()
        assert field["q_ranges"] == lists[0].data_ptr()
        assert field["num_done"] == field["found"] + 16

    # Other block sizes, another number of slices.
    for lists, size in ((block_lists(), 100), ([], 128)):
        torch.ops.magi.mask_slices([document], [], text, *sizes, lists, [size] * 2)
        assert (bool(setup.in_python()), bool(setup.repeated())) == (True, False)
    # Heads with masks of their own, and other ones.
    for heads, repeats in (([4, 2], False), ([4, 2], True), ([4, 4], False)):
        torch.ops.magi.mask_slices([document], [], text, *sizes, [], [], False, heads)
        assert (bool(setup.in_python()), bool(setup.repeated())) == (not repeats, repeats)
    # Scalars that are elsewhere, and ints that become int64, are copies.
    for _ in range(2):
        torch.ops.magi.mask_slices([document.to(torch.uint16)], [], text, *sizes, [], [])
        assert (bool(setup.in_python()), bool(setup.repeated())) == (True, False)
    for repeats in (False, True):
        lists = torch.ops.magi.mask_slices([], [], "q >= kv", *sizes, [], [])
        assert (bool(setup.in_python()), bool(setup.repeated())) == (not repeats, repeats)

    plans = []
    for repeats in (False, True):
        lists = [x.clone() for x in lists]
        plan = torch.ops.magi.plan(*lists, ROWS, ROWS, torch.bfloat16, 4, 2, 64, 64, 0.0, "")
        launched, again = setup.in_python(), setup.repeated()
        assert (bool(launched), bool(again)) == (not repeats, repeats)
        fields = idle_driver.fields(TILE_PLAN, (launched or again)[0][-1])
        assert fields["k_ranges"] == lists[1].data_ptr()
        assert fields["walks[0].tiles"] == plan[0].data_ptr()
        plans.append(plan)
    first, second = ([(x.shape, x.stride(), x.dtype) for x in plan] for plan in plans)
    assert first == second
    q, k, v = tensors()
    torch.ops.magi.ffa_fwd(q, k, v, [], plans[1], 0.125, 0.0, "")
    assert setup.in_python()
    with pytest.raises(
        RuntimeError, match=r"ValueError: captured tensor in `t0.kv.` must have 1 dim"
    ):
        torch.ops.magi.mask_slices([document[None]], [], text, *sizes, [], [])


def bit_blocks(setup: Setup) -> None:
    """The next call has other bits, elsewhere."""
    slices = bit_slices(1, ROWS, ROWS)
    plan = plan_of(slices, replace(PROBLEM, has_bits=True))
    for repeats in (False, True):
        q, k, v = tensors()
        bits = slices.bits.clone()
        rest = (lists(slices), plan, 0.125, 0.0, "hopper")
        out, lse, _ = torch.ops.magi.ffa_fwd(q, k, v, *rest, bits)
        torch.ops.magi.ffa_bwd(out, None, q, k, v, out, lse, *rest, False, bits)
        launched, again = setup.in_python(), setup.repeated()
        assert (bool(launched), bool(again)) == (not repeats, repeats)
        forward, _, backward, _ = (params for *_, params in launched or again)
        for base, params in ((FORWARD, forward), (BACKWARD, backward)):
            assert (
                idle_driver.fields(params_of(base, has_bits=True), params)["bits"]
                == bits.data_ptr()
            )
    # Intervals alone take other kernels.
    torch.ops.magi.ffa_fwd(q, k, v, lists(slices), plan_of(AttnSlices.full(ROWS)), *rest[2:])
    assert (bool(setup.in_python()), bool(setup.repeated())) == (True, False)


def by_entry(setup: Setup) -> None:
    """Tensors by entries of the batch, which the op packs and unpacks: views of them are repeated too; copies, and
    views of which nobody knows whose they are, go through Python."""
    plan = plan_of(AttnSlices.full(ROWS))
    numbering = (1, 4, ROWS, ROWS, 0)
    options = ([], plan, 0.125, 0.0, "hopper")

    def entries(heads: int) -> torch.Tensor:
        return torch.zeros(ROWS, heads, 64, dtype=torch.bfloat16).transpose(0, 1)[None]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        given = (*options, None, None, [], "", numbering, True)
        out, lse, nothing = torch.ops.magi.ffa_fwd(q, k, v, *given)
        assert (out.shape, out.stride()[1:]) == (q.shape, q.stride()[1:])
        dq, dk, _, _ = torch.ops.magi.ffa_bwd(
            *(torch.ones_like(out), None, q, k, v, out, lse),
            *(*options, False, None, None, [], "", numbering),
        )
        assert (dq.shape, dk.shape, nothing.shape) == (q.shape, k.shape, (0,))
        launched, again = setup.in_python(), setup.repeated()
        forward = idle_driver.fields(FORWARD, (launched or again)[0][-1])
        assert forward["out_rows"] == out.data_ptr()
        assert bool(launched) != bool(again)
        return bool(again)

    assert [call(entries(4), entries(2), entries(2)) for _ in range(3)] == [False, True, True]
    both = entries(4)
    assert [call(entries(4), both[:, :2], both[:, 2:]) for _ in range(2)] == [False, True]
    setup.launcher.forget()
    one = entries(2)
    assert not any(call(entries(4), one.view(one.shape), one.view(one.shape)) for _ in range(2))


def mask_bits(setup: Setup) -> None:
    """The slices of a mask_mod with bit blocks; what PyTorch computes in front of the kernel is computed in each
    call."""
    code = "def mask(q, kv, t0):;;     return t0[q] & t0[kv] > 0"
    whole, in_front = f"mask;; {code}", f"mask;; {code.replace('t0[kv]', 't0.flip(0)[kv]')}"
    verify._verified.update(f"bits of {text}" for text in (whole, in_front))
    sizes = (1, ROWS, ROWS, 0, torch.device("cpu"), [], [])
    for repeats in (False, True):
        table = torch.zeros(ROWS).long()
        lists = torch.ops.magi.mask_bits([table], [], whole, *sizes, False, [1, 1])
        assert [x.shape for x in lists] == [(9, 2), (9, 2), (9,), (10, 128, 4)]
        launched, again = setup.in_python(), setup.repeated()
        assert (len(launched), len(again)) == ((0, 1) if repeats else (1, 0))
        ((*_, params),) = launched or again
        field = idle_driver.fields(mask_mod_params((len(params) - 96) // 8), params)
        assert field["words[0]"] == table.data_ptr()
        assert field["fixed.bits"] == lists[3].data_ptr()
        assert field["fixed.seqlen_k"] == ROWS
    for _ in range(2):
        torch.ops.magi.mask_bits([table], [], in_front, *sizes, False, [1, 1])
        assert (bool(setup.in_python()), bool(setup.repeated())) == (True, False)


def block_tables(setup: Setup) -> None:
    """The plan of blocks that begin anywhere, with the key intervals of each query or without."""
    plan_lists_op.chosen_for = lambda *_, has_score, block_map: (
        PlanningKernel(),
        replace(PROBLEM, block_map=block_map),
    )
    for intervals in (None, torch.zeros(ROWS, 1, 2).int()):
        for repeats in (False, True):
            table = [torch.ones(1, 1, 5, 7).bool(), *torch.zeros(2, 1, ROWS).int()]
            sizes = ([], [], 1, ROWS, ROWS, torch.bfloat16, [4, 2, 64, 64], 0.0, "hopper", False)
            plan = torch.ops.magi.plan_lists(*sizes, intervals, table)
            launched, again = setup.in_python(), setup.repeated()
            assert (len(launched), len(again)) == ((0, 4) if repeats else (4, 0))
            field = idle_driver.fields(BLOCK_MAP, (launched or again)[0][-1])
            assert field["table.listed"] == table[0].data_ptr()
            assert field["walks[0].tiles"] == plan[0].data_ptr()
            assert field["given_intervals"] == (0 if intervals is None else intervals.data_ptr())


def other_shapes(setup: Setup) -> None:
    """What differs in anything but addresses goes to Python first."""
    slices = AttnSlices.full(ROWS)
    plan = plan_of(slices)
    q, k, v = tensors()

    def launched(q, k, v, *options):
        torch.ops.magi.ffa_fwd(q, k, v, lists(slices), plan, *options)
        return bool(setup.in_python()), bool(setup.repeated())

    assert launched(q, k, v, 0.125, 0.0, "") == (True, False)
    assert launched(q, k, v, 0.125, 0.0, "") == (False, True)
    assert launched(q, k, v, 0.25, 0.0, "") == (True, False)
    assert launched(q, k, v, 0.125, 0.0, "hopper") == (True, False)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert launched(by_head, k, v, 0.125, 0.0, "") == (True, False)
    assert launched(by_head, k, v, 0.125, 0.0, "") == (False, True)
    # A copy is made of what TMA cannot read: never repeated.
    odd = torch.empty(q.numel() + 1).bfloat16()[1:].view(q.shape)
    for _ in range(2):
        assert launched(odd, k, v, 0.125, 0.0, "") == (True, False)
    # Without a plan one is made in each call.
    for _ in range(2):
        torch.ops.magi.ffa_fwd(q, k, v, lists(slices), [], 0.125, 0.0, "")
        assert (bool(setup.in_python()), bool(setup.repeated())) == (True, False)


def same_tensors(setup: Setup) -> None:
    """Keys and values that are one tensor in the first call, and two in the second."""
    slices = AttnSlices.full(ROWS)
    plan = plan_of(slices)
    q, k, v = tensors()
    torch.ops.magi.ffa_fwd(q, k, k, lists(slices), plan, 0.125, 0.0, "")
    setup.in_python()
    torch.ops.magi.ffa_fwd(q, k, v, lists(slices), plan, 0.125, 0.0, "")
    (*_, params), *_ = setup.repeated()
    fields = idle_driver.fields(FORWARD, params)
    assert (fields["k[0]"], fields["v[0]"]) == (k.data_ptr(), v.data_ptr())


def other_devices(setup: Setup) -> None:
    """A thread that works on another device, or on none yet, asks Python."""
    slices = AttnSlices.full(ROWS)
    plan = plan_of(slices)
    q, k, v = tensors()
    found = []
    for context in (7, 7, 8, 0, 7):
        setup.driver.set_context(context)
        torch.ops.magi.ffa_fwd(q, k, v, lists(slices), plan, 0.125, 0.0, "")
        found.append(bool(setup.in_python()))
        setup.repeated()
    assert found == [True, False, True, True, False], found


def errors(setup: Setup) -> None:
    """What Python refuses is refused with its words; what failed on a device goes to Python, which says it."""
    slices = AttnSlices.full(ROWS)
    plan = plan_of(slices)
    q, k, v = tensors()
    args = (lists(slices), plan, 0.125, 0.0, "")
    torch.ops.magi.ffa_fwd(q, k, v, *args)
    wrong = [plan[0], torch.empty(0, 1, 2, 3, 4, *plan[1].shape[5:])]
    with pytest.raises(RuntimeError, match="ValueError: `plan` must be made for"):
        torch.ops.magi.ffa_fwd(q, k, v, lists(slices), wrong, 0.125, 0.0, "")
    torch.ops.magi.ffa_fwd(q, k, v, *args)
    flags = _checks._flags_of(torch.device("cpu"))
    flags.on_host[flags.slot("documents must not decrease", ""), 0] = 1
    with pytest.raises(RuntimeError, match="MaskDataError: documents must not decrease"):
        torch.ops.magi.ffa_fwd(q, k, v, *args)
    torch.ops.magi.ffa_fwd(q, k, v, *args)  # once


def nothing_is_lost(setup: Setup) -> None:
    """Memory goes back, of inputs, scratch and outputs, from several threads."""
    slices = AttnSlices.full(ROWS)
    plan = plan_of(slices)

    verify._verified.add("q >= kv")

    def work(steps: int) -> None:
        for _ in range(steps):
            q, k, v = tensors()
            out, lse, _ = torch.ops.magi.ffa_fwd(q, k, v, lists(slices), plan, 0.125, 0.0, "")
            args = (out, lse, q, k, v, out, lse, lists(slices), plan, 0.125, 0.0, "", False)
            torch.ops.magi.ffa_bwd(*args)
            of_mask = ("q >= kv", 1, ROWS, ROWS, 5000, torch.device("cpu"))
            found = torch.ops.magi.mask_slices([], [], *of_mask, [], [])
            heads = (torch.bfloat16, 4, 2, 64, 64)
            torch.ops.magi.plan(*found, ROWS, ROWS, *heads, 0.0, "")
            setup.driver.clear()

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    work(50)
    before = resident()
    work(1500)
    grown = resident() - before
    # A tensor that is never freed would be 1500 times 150 KB.
    assert grown < 40e6, grown
    threads = [threading.Thread(target=work, args=(50,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def it_comes_late(setup: Setup) -> None:
    """Calls that Python made before are the same behind the hand-over, and are repeated from the second one on; other
    threads are in the midst of calls."""
    plan = plan_of(AttnSlices.full(ROWS))
    rest = ([], plan, 0.125, 0.0, "")
    q, k, v = tensors()

    def launched() -> tuple[bool, list[bytes]]:
        out, lse, _ = torch.ops.magi.ffa_fwd(q, k, v, *rest)
        by_python, repeated = setup.in_python(), setup.repeated()
        assert bool(by_python) != bool(repeated)
        known = {out.data_ptr(): "<out>", lse.data_ptr(): "<lse>"}
        params = [addresses_out(params, known) for *_, params in by_python or repeated]
        return bool(repeated), params

    by_python = [launched() for _ in range(3)]
    other_plan = plan_of(AttnSlices.full(ROWS + 1))

    def work() -> None:
        for _ in range(10):  # the driver writes down 64 launches
            torch.ops.magi.ffa_fwd(*tensors(ROWS + 1), [], other_plan, 0.125, 0.0, "")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    setup.hand_over()
    for thread in threads:
        thread.join()
    setup.in_python(), setup.repeated()
    behind = [launched() for _ in range(3)]
    assert [is_repeated for is_repeated, _ in (*by_python, *behind)] == [False] * 4 + [True] * 2
    assert len({tuple(map(len, params)) for _, params in (*by_python, *behind)}) == 1


def run(driver: str, name: str) -> None:
    try:
        torch.manual_seed(0)
        setup = Setup(driver)
        if name != "it_comes_late":
            setup.hand_over()
        with torch.no_grad():
            globals()[name](setup)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    print(f"{name}: right", flush=True)
    os._exit(0)


def main(driver: str, *names: str) -> None:
    """Each in a fork of this process, which has only imported: an op that was taken over stays so."""
    for name in names:
        child = os.fork()
        if child == 0:
            run(driver, name)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
