"""Ranks that end or stop on GPUs: the others get an error that names them, whatever they wait for."""

import datetime
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from magi_compile import AttnSlices, _compat
from magi_compile.dtensor import ContextParallelOptions, context_parallel_attention, plan, plan_rank
from magi_compile.dtensor.ranks.watch import SECONDS_TO_TAKE_AN_ERROR
from magi_compile.dtensor.transport.collectives import COLLECTIVES, HIERARCHICAL, select
from tests.dtensor.support.ranks import Ranks

pytestmark = pytest.mark.gpu

LONG, SHORT = datetime.timedelta(minutes=3), datetime.timedelta(seconds=8)
# Since the kernels are compiled before; then a process is to end or to have its error.
ROOM = SECONDS_TO_TAKE_AN_ERROR + 30
WARM_UP = 240.0
S = 4096
OPTIONS = ContextParallelOptions(chunk_size=128)
FLAT = [name for name in COLLECTIVES if name != HIERARCHICAL]


class Step:
    """A forward and a backward of this rank."""

    def __init__(self, group, collective):
        self.group, self.collective = group, collective
        self.device = torch.device("cuda", torch.cuda.current_device())
        slices = AttnSlices.from_cu_seqlens([0, 1000, S], causal=True)
        self.planned = plan_rank(slices, group.size(), group.rank(), OPTIONS)
        rows = self.planned.dispatch.seqlen_local
        self.qkv = [
            torch.randn(rows, heads, 128, device=self.device, dtype=torch.bfloat16).requires_grad_()
            for heads in (8, 2, 2)
        ]

    def forward(self, planned=None):
        tensors = (planned or self.planned).tensors(self.device)
        out, *_ = context_parallel_attention(
            *self.qkv, tensors, self.group, collective=self.collective
        )
        return out.float().square().sum()


def is_last(group):
    return group.rank() == group.size() - 1


def stop(group, how):
    """The last rank ends or stops here."""
    if is_last(group):
        os.kill(os.getpid(), how)
        time.sleep(1)


def in_a_forward(step, how):
    stop(step.group, how)
    return step.forward().item()


def in_a_backward(step, how):
    loss = step.forward()
    torch.cuda.synchronize()
    dist.barrier(step.group)
    torch.cuda.synchronize()
    stop(step.group, how)
    loss.backward()
    torch.cuda.synchronize()


def while_others_are_steps_ahead(step, how):
    """The host does not wait, and enqueues more, until it is told."""
    stop(step.group, how)
    for _ in range(3):
        step.forward().backward()
    end = time.monotonic() + SHORT.total_seconds() + ROOM
    while time.monotonic() < end:
        time.sleep(0.1)


def while_planning(step, how):
    where = torch.arange(S) // 700

    def mask_mod(b, h, q, kv):
        stop(step.group, how)
        return (where[q] == where[kv]) & (q >= kv)

    planned = plan(mask_mod, step.group, seqlen=S, options=OPTIONS)
    return step.forward(planned._planned).item()


def run(group, program, how, collective, path):
    """Whether ranks can do it at all; the error of a rank that lives, and after how many seconds it had it."""
    try:
        select(collective, group, torch.device("cuda", torch.cuda.current_device()))
    except NotImplementedError as error:
        return str(error), 0.0
    Step(group, collective).forward().backward()  # compiles
    torch.cuda.synchronize()
    few = dist.new_group(timeout=SHORT)
    step = Step(few, collective)
    step.forward().backward()
    torch.cuda.synchronize()
    if not is_last(group):
        log = os.open(f"{path}.{group.rank()}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 2)  # also what C++ says
    dist.barrier(group)
    torch.cuda.synchronize()
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        program(step, how)
    waited = time.monotonic() - begin
    if (
        program is not while_planning
    ):  # where passes were on their way, later ones have the same error
        with pytest.raises(RuntimeError, match="did not take part in time"):
            step.forward()
    return str(raised.value), waited


def expect(size, program, how, collective, tmp_path, *, raises):
    """On every other rank an error, or the end of the process with its text, that names the last rank."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs, found {torch.cuda.device_count()}")
    ranks, path = Ranks(size, "nccl", timeout=LONG), tmp_path / "stderr"
    limit = SHORT.total_seconds() + ROOM
    begin = time.monotonic()
    try:
        ranks.start(run, program, how, collective, path)
        for rank in range(size - 1):
            left = max(WARM_UP + limit - (time.monotonic() - begin), 1)
            if raises:
                text, waited = ranks.result_of(rank, left)
                if "no collective can move rows" in text:
                    pytest.skip(text)
                assert waited < limit
            else:
                assert ranks.exit_code_of(rank, left) not in (None, 0)
                text = Path(f"{path}.{rank}").read_text()
            assert f"rank {size - 1} did not take part in time" in text or (
                f"has not heard of rank {size - 1} in a forward" in text
            ), text
    finally:
        ranks.close()


HOW = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda x: x.name)
PROGRAMS = [in_a_forward, in_a_backward, while_others_are_steps_ahead]


@HOW
@pytest.mark.parametrize("program", PROGRAMS)
def test_native(program, how, tmp_path):
    """The error is raised in the thread that called attention. In a backward the host waits for a thread of autograd's,
    which does not take it: the process ends with its text."""
    expect(2, program, how, "native", tmp_path, raises=program is not in_a_backward)


@HOW
@pytest.mark.parametrize("program", [in_a_forward, in_a_backward])
def test_all_to_all(program, how, tmp_path):
    """The host waits for a kernel of NCCL's, which nobody but NCCL can release: the process ends."""
    expect(2, program, how, "all_to_all", tmp_path, raises=False)


@HOW
@pytest.mark.parametrize("collective", FLAT)
def test_while_planning(collective, how, tmp_path):
    expect(2, while_planning, how, collective, tmp_path, raises=True)


@pytest.mark.parametrize("collective", FLAT)
def test_of_four_ranks_the_late_one_is_named(collective, tmp_path):
    raises = collective == "native"
    expect(4, in_a_forward, signal.SIGKILL, collective, tmp_path, raises=raises)


def run_a_capture(group):
    """The watch looks at a pass that is under way while a graph is captured in global mode."""
    step = Step(group, None)
    step.forward()
    torch.cuda.synchronize()
    _compat.spin_gpu(5 * 10**9)  # some seconds
    step.forward()
    x, graph, side = torch.zeros(8, device=step.device), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
        x.add_(1)
        time.sleep(1.5)
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    return x.tolist()


def test_the_watch_beside_a_capture(gpu_ranks_of):
    assert gpu_ranks_of(1).run(run_a_capture) == [[1.0] * 8]
