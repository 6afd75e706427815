"""A local kernel that takes packed documents, in plain PyTorch: what the adapters of packages have in common runs on a
CPU with it."""

import torch

from magi_bench.ranks.strategies.varlen import VarlenKernel
from magi_compile.kernels.base import BackwardOutput, ForwardOutput


class Plain(VarlenKernel):
    def missing(self):
        return None

    def forward(self, q, k, v, segments):
        check(q, k, segments)
        out = torch.zeros_like(q)
        lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf)
        for rows, keys, visible in each(segments):
            scores = self._scores(q[rows], k[keys], visible)
            lse[:, rows] = scores.logsumexp(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), self._wide(v[keys]))
        return ForwardOutput(out, lse)

    def backward(self, dout, saved, segments):
        q, k, v, out, lse = saved
        grads = BackwardOutput(*(torch.zeros_like(x) for x in (q, k, v)))
        scale, group = self.problem.softmax_scale, self.problem.qhead_per_kvhead
        for rows, keys, visible in each(segments):
            p = (self._scores(q[rows], k[keys], visible) - lse[:, rows, None]).exp()
            dp = torch.einsum("qhd,khd->hqk", dout[rows], self._wide(v[keys]))
            delta = (dout[rows] * out[rows]).sum(-1).T[..., None]
            ds = p * (dp - delta) * scale
            grads.dq[rows] += torch.einsum("hqk,khd->qhd", ds, self._wide(k[keys]))
            dk = torch.einsum("hqk,qhd->khd", ds, q[rows])
            dv = torch.einsum("hqk,qhd->khd", p, dout[rows])
            grads.dk[keys] += dk.unflatten(1, (-1, group)).sum(2)
            grads.dv[keys] += dv.unflatten(1, (-1, group)).sum(2)
        return grads

    def _scores(self, q, k, visible):
        scores = torch.einsum("qhd,khd->hqk", q, self._wide(k)) * self.problem.softmax_scale
        return scores.masked_fill(~visible, -torch.inf)

    def _wide(self, x):
        return x.repeat_interleave(self.problem.qhead_per_kvhead, 1)


def check(q, k, segments):
    """Segments are all rows and keys, as a package takes them."""
    for bounds, most, x in (
        (segments.queries, segments.most_queries, q),
        (segments.keys, segments.most_keys, k),
    ):
        assert bounds[0] == 0
        assert bounds[-1] == len(x)
        assert (bounds.diff() >= 0).all()
        assert bounds.diff().max() == most


def each(segments):
    """Rows, keys and the mask of each segment that has both, by `cu_seqlens` alone."""
    queries, keys = segments.queries.tolist(), segments.keys.tolist()
    for i in range(len(queries) - 1):
        rows, columns = slice(*queries[i : i + 2]), slice(*keys[i : i + 2])
        num_rows, num_keys = queries[i + 1] - queries[i], keys[i + 1] - keys[i]
        if num_rows and num_keys:
            visible = torch.ones(num_rows, num_keys, dtype=torch.bool)
            if segments.causal:
                visible = visible.tril(num_keys - num_rows)
            yield rows, columns, visible
