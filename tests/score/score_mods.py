"""Score_mods of the kinds that models have, and dense attention with them."""

import math
from typing import NamedTuple

import torch

BATCH, HEADS, HEADS_KV, SEQLEN, DIM = 2, 4, 2, 70, 16


class Case(NamedTuple):
    """`make(*captures)` gives the score_mod; gradients of the floating captures are wanted."""

    name: str
    make: object
    captures: list

    def tensors(self, dtype=torch.float32):
        """Fresh captures; those that are floats need gradients and have this dtype."""
        return [
            x.to(dtype).requires_grad_() if x.is_floating_point() else x.clone()
            for x in self.captures
        ]


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alibi(slopes):
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


def computed_alibi(exponents):
    """What is computed of captured tensors alone is no part of the program."""

    def score_mod(score, b, h, q, kv):
        return score + torch.exp2(exponents.float() - 3)[h] * (kv - q)

    return score_mod


def relative(bias):
    return lambda score, b, h, q, kv: score + bias[h, q - kv + SEQLEN]


def learned(bias, gate):
    """The bias of a head and a distance, and a gate of each key."""
    return lambda score, b, h, q, kv: score * gate[b, kv].sigmoid() + bias[h, q - kv + SEQLEN]


def t5(table):
    def bucket(distance):
        distance = (-distance).clamp(min=0)
        large = 4 + (torch.log((distance.float() + 0.5) / 4) / math.log(16) * 4).to(torch.int32)
        return torch.where(distance < 4, distance, large.clamp(max=7))

    return lambda score, b, h, q, kv: score + table[bucket(kv - q), h]


def documents(document, weight):
    """The bias of a pair is that of a distance between documents, looked up by what is looked up."""

    def score_mod(score, b, h, q, kv):
        return score + weight[h, (document[b, q] - document[b, kv]).abs()]

    return score_mod


def tanh_of_sums(bias):
    return lambda score, b, h, q, kv: 2 * torch.tanh((score + bias[q % 7] * bias[kv % 7]) / 2)


def clamp():
    return lambda score, b, h, q, kv: score.clamp(-0.7, 0.9)


def where():
    return lambda score, b, h, q, kv: torch.where((q - kv > 5) & (h > 0), score * 0.5, score + 1)


def temperature(factor, shift):
    return lambda score, b, h, q, kv: score * factor + torch.relu(score - shift)


def square():
    """The only gradient is that of the score, which is far from linear."""
    return lambda score, b, h, q, kv: score * score.abs() - torch.exp(-score) * b


CASES = [
    Case("alibi", alibi, [_random(HEADS).abs() / 8]),
    Case("computed_alibi", computed_alibi, [_random(HEADS)]),
    Case("relative", relative, [_random(HEADS, 2 * SEQLEN + 1)]),
    Case("learned", learned, [_random(HEADS, 2 * SEQLEN + 1), _random(BATCH, SEQLEN, seed=1)]),
    Case("t5", t5, [_random(8, HEADS)]),
    Case(
        "documents",
        documents,
        [torch.arange(SEQLEN).expand(BATCH, -1) // torch.tensor([[20], [30]]), _random(HEADS, 4)],
    ),
    Case("tanh_of_sums", tanh_of_sums, [_random(7)]),
    Case("clamp", clamp, []),
    Case("where", where, []),
    Case("temperature", temperature, [torch.tensor(1.5), torch.tensor(0.1)]),
    Case("square", square, []),
]


def causal(b, h, q, kv):
    return q >= kv


def window_by_head(b, h, q, kv):
    return (q >= kv) & (q - kv < 12 * (h + 1))


def scattered_by_head(b, h, q, kv):
    """Blocks of bits of each head."""
    return scattered(b, h, q, kv) & window_by_head(b, h, q, kv)


def scattered(b, h, q, kv):
    """Blocks of bits; some rows see nothing."""
    return ((q * 7 + kv * 5) % 11 < 3) & (q % 9 != 4) & (q >= kv)


def qkv(dtype=torch.float32, seqlen=SEQLEN):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(BATCH, heads, seqlen, DIM, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, HEADS_KV, HEADS_KV)
    ]


def dense(q, k, v, score_mod, visible):
    """out and lse with the whole score matrix, in the dtype of q; a row without scores gives 0 and -inf.

    The score_mods here are the same of tensors that have all pairs.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    grid = [
        torch.arange(size).view([size if i == dim else 1 for i in range(4)])
        for dim, size in enumerate(sizes)
    ]
    scores = score_mod(q @ k.mT * q.shape[3] ** -0.5, *grid)
    scores = scores.masked_fill(~visible, -torch.inf)
    sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(sees_nothing, 0.0).softmax(-1).masked_fill(sees_nothing, 0.0)
    lse = scores.masked_fill(sees_nothing, 0.0).logsumexp(-1)
    return weights.to(v.dtype) @ v, lse.masked_fill(sees_nothing[..., 0], -torch.inf)


def results(attend, tensors, captures):
    """out, lse, and the gradients of a loss of both, of `tensors` and of the captures that need some."""
    out, lse, *_ = attend(*tensors)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    loss = (out * weights).sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    inputs = [x for x in (*tensors, *captures) if x.requires_grad]
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, inputs))]


def assert_as_good_as_plain(ours, make, tensors, captures, visible):
    """At most twice the error of plain PyTorch in the same dtype, and some rounding steps more: in fp32 for sums in
    another order, in other dtypes for the inputs and the result, since sums are in fp32. Dtypes are those of the
    inputs."""
    plain = _dense_results(make, tensors, captures, visible)
    exact = _dense_results(make, _exact(tensors), _exact(captures), visible)
    assert len(ours) == len(exact)
    for number, (x, y, z) in enumerate(zip(ours, plain, exact, strict=True)):
        if number != 1:  # lse is fp32
            assert x.dtype == y.dtype
        hidden = z == -torch.inf
        assert (x == -torch.inf).equal(hidden)
        x, y, z = (t.double().masked_fill(hidden, 0.0) for t in (x, y, z))
        dtype = ours[number].dtype
        steps = 8 if dtype == torch.float32 else 2
        bound = 2 * (y - z).abs().max() + steps * torch.finfo(dtype).eps * z.abs().max()
        assert (x - z).abs().max() <= bound, (number, (x - z).abs().max(), bound)


def _dense_results(make, tensors, captures, visible):
    score_mod = make(*captures)
    return results(lambda *qkv: dense(*qkv, score_mod, visible), tensors, captures)


def _exact(tensors):
    return [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in tensors
    ]
