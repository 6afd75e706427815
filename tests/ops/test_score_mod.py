"""Which score_mods fold into a scale and a soft-cap."""

import operator

import pytest
import torch

from magi_compile.ops.score_mod import ScoreMod, UnsupportedScoreModError, trace_score_mod

FOLDED = {
    "none": (None, ScoreMod()),
    "identity": (lambda s, b, h, q, k: s, ScoreMod()),
    "scale": (lambda s, b, h, q, k: s * 0.5, ScoreMod(scale=0.5)),
    "scale left": (lambda s, b, h, q, k: 0.5 * s / 2, ScoreMod(scale=0.25)),
    "negative": (lambda s, b, h, q, k: -s, ScoreMod(scale=-1.0)),
    "softcap": (lambda s, b, h, q, k: 20 * torch.tanh(s / 20), ScoreMod(1.0, 20.0)),
    "method": (lambda s, b, h, q, k: s.div(20).tanh().mul(20), ScoreMod(1.0, 20.0)),
    "operator": (
        lambda s, b, h, q, k: operator.mul(torch.mul(s, 0.5).tanh(), 4),
        ScoreMod(2.0, 4.0),
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded(name):
    score_mod, expected = FOLDED[name]
    found = trace_score_mod(score_mod)
    assert (found.scale, found.softcap) == pytest.approx((expected.scale, expected.softcap))
    if score_mod is not None:
        s = torch.randn(50, dtype=torch.float64) * 30
        capped = found.scale * s
        if found.softcap:
            capped = found.softcap * torch.tanh(capped / found.softcap)
        torch.testing.assert_close(capped, score_mod(s, None, None, None, None))


def test_an_index_of_a_shard_that_nobody_uses():
    """What is added to it makes it one of the whole tensor."""
    found = trace_score_mod(lambda s, b, h, q, k: FOLDED["scale"][0](s, b + 1, 2 + h, q, k))
    assert found == trace_score_mod(FOLDED["scale"][0])


bias = torch.zeros(8)
REFUSED = {
    "bias": (lambda s, b, h, q, k: s + 1.0, "applies `add`"),
    "bias left": (lambda s, b, h, q, k: 1.0 - s, "applies `sub`"),
    "function": (lambda s, b, h, q, k: torch.add(s, 1.0), "applies `add`"),
    "branch": (lambda s, b, h, q, k: s if s > 0 else -s, "applies `gt`"),
    "position": (lambda s, b, h, q, k: s * (q - k), "depends on the query index"),
    "head": (lambda s, b, h, q, k: s * (h + 1), "depends on the head index"),
    "table": (lambda s, b, h, q, k: s * bias[h], "depends on the head index|traced"),
    "tanh twice": (lambda s, b, h, q, k: s.tanh().tanh(), "applies tanh twice"),
    "relu": (lambda s, b, h, q, k: torch.relu(s), "applies `relu`"),
    "where": (lambda s, b, h, q, k: torch.where(q >= k, s, -1e9), "query index|`where`"),
    "tensor factor": (lambda s, b, h, q, k: s * torch.ones(3), "multiplies the score by Tensor"),
    "inverse": (lambda s, b, h, q, k: torch.div(1.0, s), "divides by the score"),
    "zero": (lambda s, b, h, q, k: s / 0, "divides the score"),
    "constant": (lambda s, b, h, q, k: 1.0, "returns float, not a score"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    score_mod, message = REFUSED[name]
    with pytest.raises(UnsupportedScoreModError, match=message):
        trace_score_mod(score_mod)
