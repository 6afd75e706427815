"""Score programs in the Hopper kernels, as they are, on a CPU, against dense attention in fp64; see
`tests/kernels/sm90/forward/test_on_cpu.py`."""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.sm90 import kernel as module
from magi_compile.masks.evaluation.bit_blocks import Grid, Heads, slices_with_bits
from magi_compile.masks.slices import AttnSlices, MaskType
from magi_compile.plan.tiles import build_tile_plan
from magi_compile.score.program import ScoreCall
from magi_compile.score.read import trace_score_program
from tests.kernels.support.on_a_cpu import compile_once, launching
from tests.score.score_mods import CASES, SEQLEN, assert_as_good_as_plain, results

CPU = torch.device("cpu")
NUM_SMS = 3
BATCH, NHEADS, NHEADS_KV = 2, 4, 2  # those that the captured tensors of CASES are made for
PROGRAMS = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Masked:
    """Who sees what: `mask(b, h, q, kv)`, and how slices say it. With `is_by_head` heads are batch entries of their own."""

    name: str
    mask: object
    has_bits: bool = False
    is_by_head: bool = False

    def slices(self, batch, seqlen):
        if self.has_bits:
            heads = Heads(NHEADS, NHEADS_KV) if self.is_by_head else Heads()
            grid = Grid(batch, heads, seqlen, seqlen)
            return slices_with_bits(self.mask, grid, None, torch.device("cpu"))
        ranges = [(b * seqlen, (b + 1) * seqlen) for b in range(batch)]
        return AttnSlices(
            torch.tensor(ranges, dtype=torch.int32),
            torch.tensor(ranges, dtype=torch.int32),
            torch.full((batch,), MaskType.CAUSAL, dtype=torch.int32),
            batch * seqlen,
            batch * seqlen,
        )

    def dense(self, batch, seqlen):
        sizes = (batch, NHEADS, seqlen, seqlen)
        grid = [
            torch.arange(size).view([size if i == dim else 1 for i in range(4)])
            for dim, size in enumerate(sizes)
        ]
        return self.mask(*grid).expand(sizes)


CAUSAL = Masked("causal", lambda b, h, q, kv: q >= kv)
SCATTERED = Masked(
    "scattered",
    lambda b, h, q, kv: ((q * 7 + kv * 5) % 11 < 3) & (q % 9 != 4) & (q >= kv),
    has_bits=True,
)
BY_HEAD = Masked(
    "by_head", lambda b, h, q, kv: (q >= kv) & (q - kv < 12 * (h + 1)), True, is_by_head=True
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_once(tmp_path_factory)


@pytest.fixture
def kernel(compiled, monkeypatch):
    def launch(function, grid, block, params, stream, options):
        function(grid, block, params, NUM_SMS, 0, options.cluster)

    with launching(monkeypatch, compiled, NUM_SMS, launch):
        yield module.CudaKernel()


class Attention(torch.autograd.Function):
    """out `[B, H, S, D]` and lse by the kernel, of packed rows as a lowered call has them."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        ctx.call, ctx.shapes = call, (q.shape, k.shape)
        packed = [call.packed(x) for x in (q, k, v)]
        out, lse = call.forward(*packed)
        ctx.save_for_backward(*packed, out, lse)
        return call.unpacked(out, q.shape), call.unpacked(lse.t()[..., None], q.shape)[..., 0]

    @staticmethod
    def backward(ctx, dout, dlse):
        call, (q_shape, k_shape) = ctx.call, ctx.shapes
        dlse = call.packed(dlse[..., None])[..., 0].t().contiguous()
        grads = Grads(call.packed(dout), dlse)
        dq, dk, dv = call.backward(grads, Saved(*ctx.saved_tensors))
        return (call.unpacked(dq, q_shape), *(call.unpacked(x, k_shape) for x in (dk, dv)), None)


class Call:
    def __init__(self, kernel, program, captures, mask, shape, dtype, deterministic=False):
        self.kernel, self.mask, self.deterministic = kernel, mask, deterministic
        self.batch, self.seqlen, head_dim = shape
        nheads = (1, 1) if mask.is_by_head else (NHEADS, NHEADS_KV)
        self.problem = AttnProblem(
            *("cuda", (9, 0), dtype, *nheads, head_dim, head_dim, head_dim**-0.5),
            has_bits=mask.has_bits,
            has_score=True,
        )
        found, tables = trace_score_program(program.make(*captures), torch.device("cpu"))
        by_entry = NHEADS if mask.is_by_head else 1
        self.score = ScoreCall(found, tables, [], self.seqlen, self.seqlen, by_entry)
        self.slices = mask.slices(self.batch, self.seqlen)
        plan = build_tile_plan(self.slices, **plan_tiles(self.problem)._asdict(), exact=False)
        parts, sizes = torch.empty(0, dtype=torch.int32), list(plan_tiles(self.problem))
        self.plan = [*plan[:3], parts, sizes, *plan[3:]]

    def packed(self, x):
        if self.mask.is_by_head:
            return x.reshape(-1, 1, x.shape[3]).contiguous()
        return x.transpose(1, 2).flatten(0, 1).contiguous()

    def unpacked(self, x, shape):
        batch, nheads, seqlen, _ = shape
        if self.mask.is_by_head:
            return x.reshape(batch, nheads, seqlen, -1)
        return x.reshape(batch, seqlen, nheads, -1).transpose(1, 2)

    def forward(self, q, k, v):
        given = (self.slices, self.plan, self.problem, self.score)
        return self.kernel.scored_forward(q, k, v, *given)

    def backward(self, grads, saved):
        given = (self.slices, self.plan, self.problem, self.score, [])
        found = self.kernel.scored_backward(grads, saved, *given, deterministic=self.deterministic)
        return found.qkv


def check(
    kernel, name, mask, *, batch=BATCH, seqlen=SEQLEN, head_dim=64, dtype=torch.bfloat16, **how
):
    program = PROGRAMS[name]
    captures = [x.detach() for x in program.tensors(dtype)]
    generator = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(batch, heads, seqlen, head_dim, generator=generator).to(dtype).requires_grad_()
        for heads in (NHEADS, NHEADS_KV, NHEADS_KV)
    ]
    call = Call(kernel, program, captures, mask, (batch, seqlen, head_dim), dtype, **how)
    ours = results(lambda q, k, v: Attention.apply(q, k, v, call), tensors, captures)
    visible = mask.dense(batch, seqlen)
    assert_as_good_as_plain(ours, program.make, tensors, captures, visible)
    return ours


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, kernel):
    check(kernel, name, CAUSAL)


@pytest.mark.parametrize("head_dim", [128, 192])
@pytest.mark.parametrize("name", ["alibi", "relative", "tanh_of_sums"])
def test_wider_heads(name, head_dim, kernel):
    check(kernel, name, CAUSAL, head_dim=head_dim)


def test_some_heads_have_no_registers_for_slopes():
    problem = AttnProblem("cuda", (9, 0), torch.bfloat16, 4, 2, 128, 128, 0.1, has_score=True)
    cuda = module.CudaKernel()
    for name in ("alibi", "square"):
        program, tables = trace_score_program(PROGRAMS[name].make(*PROGRAMS[name].tensors()), CPU)
        dtypes, ranks = [x.dtype for x in tables], [x.dim() for x in tables]
        reasons = cuda.score_refusals(problem, program, dtypes, ranks)
        said = ["needs another head_dim than 128" in reason for reason in reasons]
        assert said == [True] * (name == "square")
        for other in (64, 96, 192, 256):
            narrow = replace(problem, head_dim=other, head_dim_v=other)
            assert not cuda.score_refusals(narrow, program, dtypes, ranks)


@pytest.mark.parametrize("mask", [SCATTERED, BY_HEAD], ids=lambda mask: mask.name)
@pytest.mark.parametrize("name", ["alibi", "documents", "square"])
def test_bits_and_heads_that_are_entries(name, mask, kernel):
    check(kernel, name, mask)


@pytest.mark.parametrize("name", ["alibi", "tanh_of_sums"])
def test_one_long_sequence(name, kernel):
    """Blocks that have one entry, which short sequences do not."""
    check(kernel, name, CAUSAL, batch=1, seqlen=300)


@pytest.mark.parametrize("name", ["alibi", "square"])
def test_deterministic(name, kernel):
    first, second = (check(kernel, name, CAUSAL, deterministic=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
