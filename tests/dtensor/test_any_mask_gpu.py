"""Masks without exact slices and score_mods across GPUs, over NCCL: what one process has on a CPU in fp32."""

from contextlib import nullcontext
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import magi_compile
from magi_compile.dtensor import ContextParallelOptions, context_parallel, plan
from magi_compile.dtensor.transport import collectives
from magi_compile.dtensor.transport.native import NativeCollective
from tests.dtensor import test_any_mask as on_cpus
from tests.dtensor.test_any_mask import CASES, called, gradients, inputs, leaves_of
from tests.dtensor.test_attention_gpu import call, refusals_of
from tests.dtensor.test_roll import DOCUMENTS, SHIFTS, wholes
from tests.dtensor.test_roll import OPTIONS as ROLL
from tests.support.deterministic import deterministic_algorithms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("size", [2, 4], ids=lambda size: f"{size}gpus"),
]
OPTIONS = {
    "stages": on_cpus.SPREAD,
    "merged": on_cpus.AT_ONCE,
    "uneven": on_cpus.UNEVEN,
    "shared heads": replace(on_cpus.SPREAD, head_ranks=2),
    "early": ContextParallelOptions(
        chunk_size=16,
        degree=0,
        backward_degree=0,
        cost=replace(ContextParallelOptions().cost, latency_seconds=1.0),
    ),
}


@pytest.fixture
def run(gpu_ranks_of, size):
    ranks = gpu_ranks_of(size)

    def run(function, *arguments, collective="all_to_all", **options):
        for refusals in ranks.run(refusals_of, collective):
            if refusals:
                pytest.skip(refusals)
        return ranks.run(call, function, arguments, options)

    return run


def on_gpu(value):
    """`value`, with its tensors and those that its mask_mod has captured on this rank's GPU."""
    for cell in getattr(value.mask_mod, "__closure__", None) or ():
        if isinstance(cell.cell_contents, torch.Tensor):
            cell.cell_contents = cell.cell_contents.cuda()
    return value.to("cuda")


def rounded():
    """q, k, v as bfloat16 has them; what is learned stays in fp32."""
    (q, k, v, *learned), dout, dlse = inputs()
    return (*(x.bfloat16().float() for x in (q, k, v)), *learned), dout.bfloat16().float(), dlse


def on_one_process(mask, score_mod):
    given, dout, dlse = rounded()
    leaves = leaves_of(given)
    q, k, v, *learned = leaves
    out, lse = magi_compile.flex_attention(
        *(q, k, v, score_mod(*learned), mask), enable_gqa=True, return_lse=True
    )
    return out.detach(), lse.detach(), gradients(out, lse, leaves, dout, dlse)


def tensors_here(p):
    given, dout, dlse = rounded()
    q, k, v = (p.shard(x, 2).cuda().bfloat16() for x in given[:3])
    leaves = leaves_of([q, k, v, *(x.cuda() for x in given[3:])])
    return leaves, p.shard(dout, 2).cuda().bfloat16(), p.shard(dlse, 2).cuda()


def compare(group, p, expected, out, lse, grads):
    for x in grads[3:]:
        dist.all_reduce(x, group=group)
    names = ("out", "lse", "dq", "dk", "dv", "dslopes", "dbias")
    found = [p.unshard(x.contiguous(), 2) for x in (out, lse, *grads[:3])] + grads[3:]
    wanted = [*expected[:2], *expected[2]]
    for name, x, y in zip(names, found, wanted, strict=True):
        x = x.float().cpu()
        size = max(1.0, y[y.isfinite()].abs().max().item())
        torch.testing.assert_close(
            x, y, atol=0.02 * size, rtol=0.02, msg=lambda m, n=name: f"{n}: {m}"
        )


def run_with(group, name, options, collective):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_chosen", WeakKeyDictionary())  # what is chosen here stays here
        if collective != "native":  # which is chosen where it serves
            patch.setattr(NativeCollective, "refusals", lambda *_: ["not in this test"])
        run_eager(group, name, options)
        device = torch.device("cuda", torch.cuda.current_device())
        assert collectives.select("auto", group, device).name == collective


def run_eager(group, name, options, deterministic=False):
    make, score_mod = CASES[name]
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("cp",))
    for seed in range(2):
        expected = on_one_process(make(seed), score_mod)
        p = plan(on_gpu(make(seed)), mesh, options=options)
        with deterministic_algorithms() if deterministic else nullcontext():
            found = []
            for _ in range(2 if deterministic else 1):
                leaves, dout, dlse = tensors_here(p)
                q, k, v, *learned = leaves
                out, lse = p.attention(q, k, v, score_mod=score_mod(*learned), return_lse=True)
                found.append([out, lse, *gradients(out, lse, leaves, dout, dlse)])
        if deterministic:
            for x, y in zip(*found, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=0)
        out, lse, *grads = found[0]
        compare(group, p, expected, out.detach(), lse.detach(), grads)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("collective", ["all_to_all", "native"])
@pytest.mark.parametrize("name", CASES)
def test_eager(run, name, collective, options):
    run(run_with, name, OPTIONS[options], collective, collective=collective)


@pytest.mark.parametrize("name", ["scattered, alibi", "lists of heads, alibi", "entries, relative"])
def test_deterministic(run, name):
    """The same bits twice; with a score_mod that learns nothing, as a learned bias is refused there on a GPU."""
    run(run_without_learning, name)


def run_without_learning(group, name):
    make, _ = CASES[name]
    CASES["here"] = (make, on_cpus.capped)
    run_eager(group, "here", on_cpus.SPREAD, deterministic=True)


def run_compiled(group, name):
    make, score_mod = CASES[name]
    torch._dynamo.reset()
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("cp",))

    @torch.compile(backend="magi", fullgraph=True)
    def layer(q, k, v, mask, *learned):
        return called(q, k, v, score_mod(*learned), mask)

    for seed in range(2):
        expected = on_one_process(make(seed), score_mod)
        mask = on_gpu(make(seed))
        with context_parallel(mesh, mask=mask, options=on_cpus.SPREAD) as p:
            leaves, dout, dlse = tensors_here(p)
            q, k, v, *learned = leaves
            out, lse = layer(q, k, v, mask, *learned)
            grads = gradients(out, lse, leaves, dout, dlse)
            compare(group, p, expected, out.detach(), lse.detach(), grads)


@pytest.mark.parametrize(
    "name", ["scattered, alibi", "windows of heads, relative", "lists of heads, alibi"]
)
def test_compiled(run, name):
    run(run_compiled, name)


def run_roll(group):
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("cp",))
    p = plan(DOCUMENTS, mesh, options=ROLL)
    for whole, dim in wholes():
        whole = whole.cuda()
        for shifts in SHIFTS:
            found = p.roll(p.shard(whole, dim), shifts, dim)
            torch.testing.assert_close(found, p.shard(whole.roll(shifts, dim), dim), rtol=0, atol=0)


def test_roll(run):
    run(run_roll)
