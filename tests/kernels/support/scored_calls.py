"""Calls of the Hopper kernels with a score program, on packed rows as a lowered call has them,
for comparisons with dense attention."""

from dataclasses import dataclass

import torch

from magi_compile.kernels.base import AttnProblem, Grads, Saved
from magi_compile.kernels.heuristics import plan_tiles
from magi_compile.kernels.plan import Plan
from magi_compile.masks.evaluation.bit_blocks import slices_with_bits
from magi_compile.masks.evaluation.sizes import Heads, MaskSizes
from magi_compile.masks.slices import AttnSlices, MaskType
from magi_compile.plan.tiles import build_tile_plan
from magi_compile.score.program import ScoreCall
from magi_compile.score.read import trace_score_program
from tests.score.score_mods import SEQLEN, assert_as_good_as_plain, results
from tests.score.score_mods import dense as attend_densely

BATCH, NHEADS, NHEADS_KV = 2, 4, 2  # those that the captured tensors of CASES are made for


@dataclass(frozen=True)
class Masked:
    """Who sees what: `mask(b, h, q, kv)`, and how slices say it: with bit blocks, or one of `mask_type` for each piece
    of so many rows (0: of a batch entry) and the same keys. With `is_by_head` heads are batch entries of their own."""

    name: str
    mask: object
    has_bits: bool = False
    is_by_head: bool = False
    mask_type: MaskType = MaskType.CAUSAL
    piece: int = 0

    def slices(self, batch, seqlen):
        if self.has_bits:
            heads = Heads(NHEADS, NHEADS_KV) if self.is_by_head else Heads()
            sizes = MaskSizes(batch, seqlen, seqlen, heads)
            return slices_with_bits(self.mask, sizes, None, torch.device("cpu"))
        ranges = [
            (b * seqlen + begin, b * seqlen + min(begin + (self.piece or seqlen), seqlen))
            for b in range(batch)
            for begin in range(0, seqlen, self.piece or seqlen)
        ]
        return AttnSlices(
            torch.tensor(ranges, dtype=torch.int32),
            torch.tensor(ranges, dtype=torch.int32),
            torch.full((len(ranges),), self.mask_type, dtype=torch.int32),
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
FULL = Masked("full", lambda b, h, q, kv: (q >= 0) & (kv >= 0), mask_type=MaskType.FULL)
DOCUMENTS = Masked("documents", lambda b, h, q, kv: (q >= kv) & (q // 30 == kv // 30), piece=30)
SCATTERED = Masked(
    "scattered",
    lambda b, h, q, kv: ((q * 7 + kv * 5) % 11 < 3) & (q % 9 != 4) & (q >= kv),
    has_bits=True,
)
BY_HEAD = Masked(
    "by_head", lambda b, h, q, kv: (q >= kv) & (q - kv < 12 * (h + 1)), True, is_by_head=True
)


class Attention(torch.autograd.Function):
    """out `[B, H, S, D]` and lse by the kernel, of packed rows as a lowered call has them,
    and of the captured tensors of the call."""

    @staticmethod
    def forward(ctx, q, k, v, call, *tables):
        ctx.call, ctx.shapes = call, (q.shape, k.shape)
        packed = [call.packed(x) for x in (q, k, v)]
        out, lse = call.forward(*packed) if call.exact is None else call.of_dense(q, k, v)
        ctx.save_for_backward(*packed, out, lse)
        return call.unpacked(out, q.shape), call.unpacked(lse.t()[..., None], q.shape)[..., 0]

    @staticmethod
    def backward(ctx, dout, dlse):
        call, (q_shape, k_shape) = ctx.call, ctx.shapes
        dlse = call.packed(dlse[..., None])[..., 0].t().contiguous()
        grads = Grads(call.packed(dout), dlse)
        tables = call.score.tables
        wanted = [i for i in call.differentiable if ctx.needs_input_grad[4 + i]]
        sums = {i: torch.zeros(tables[i].shape) for i in wanted}
        dq, dk, dv = call.backward(grads, Saved(*ctx.saved_tensors), sums)
        of_tables = {i: x.to(tables[i].dtype) for i, x in sums.items()}
        of_kv = [call.unpacked(x, k_shape) for x in (dk, dv)]
        return (
            *(call.unpacked(dq, q_shape), *of_kv, None),
            *map(of_tables.get, range(len(call.score.tables))),
        )


class Call:
    def __init__(self, kernel, make, captures, mask, shape, dtype, deterministic=False, exact=None):
        """`exact(q, k, v)` stands for the kernel's forward."""
        self.kernel, self.mask, self.deterministic, self.exact = kernel, mask, deterministic, exact
        self.batch, self.seqlen, head_dim, head_dim_v = shape
        nheads = (1, 1) if mask.is_by_head else (NHEADS, NHEADS_KV)
        self.problem = AttnProblem(
            *("cuda", (9, 0), dtype, *nheads, head_dim, head_dim_v, head_dim**-0.5),
            has_bits=mask.has_bits,
            has_score=True,
        )
        found, tables = trace_score_program(make(*captures), torch.device("cpu"))
        self.tables, self.differentiable = tables, found.differentiable_tables
        by_entry = NHEADS if mask.is_by_head else 1
        values = [x.detach() for x in tables]
        self.score = ScoreCall(found, values, [], self.seqlen, self.seqlen, by_entry)
        self.slices = mask.slices(self.batch, self.seqlen)
        plan = build_tile_plan(self.slices, **plan_tiles(self.problem)._asdict(), exact=False)
        self.plan = Plan(plan_tiles(self.problem), plan.q_walk, plan.k_walk)

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
        return self.kernel.forward(
            *(q, k, v, self.slices, self.plan, self.problem), score=self.score
        )

    def of_dense(self, q, k, v):
        out, lse = self.exact(*(x.double() for x in (q, k, v)))
        return self.packed(out.to(q.dtype)), self.packed(lse[..., None])[..., 0].t().float()

    def backward(self, grads, saved, sums):
        score = self.score._replace(sums=sums)
        given = (grads, saved, self.slices, self.plan, self.problem)
        return self.kernel.backward(*given, score=score, deterministic=self.deterministic)


def check(
    kernel,
    case,
    mask,
    *,
    batch=BATCH,
    seqlen=SEQLEN,
    head_dim=64,
    head_dim_v=None,
    dtype=torch.bfloat16,
    has_forward=True,
    **how,
):
    """Values and gradients of `case`, those of its captured tensors too unless `learns` is False; these are of `dtype`
    too, or of `table_dtype`. `dense` makes its score_mod for dense attention, where that is another one. Without
    `has_forward` the backward gets what dense attention saves."""
    captures = case.tensors(how.pop("table_dtype", dtype))
    dense = how.pop("dense", case.make)
    if not how.pop("learns", True):
        captures = [x.detach() for x in captures]
    generator = torch.Generator().manual_seed(3)
    dims = head_dim, head_dim_v or head_dim
    tensors = [
        torch.randn(batch, heads, seqlen, columns, generator=generator).to(dtype).requires_grad_()
        for heads, columns in ((NHEADS, dims[0]), (NHEADS_KV, dims[0]), (NHEADS_KV, dims[1]))
    ]

    visible = mask.dense(batch, seqlen)
    if not has_forward:
        constants = [x.detach().double() if x.is_floating_point() else x for x in captures]
        how["exact"] = lambda *qkv: attend_densely(*qkv, dense(*constants), visible)

    def attend(q, k, v):
        call = Call(kernel, case.make, captures, mask, (batch, seqlen, *dims), dtype, **how)
        return Attention.apply(q, k, v, call, *call.tables)

    ours = results(attend, tensors, captures)
    assert_as_good_as_plain(ours, dense, tensors, captures, visible)
    return ours
