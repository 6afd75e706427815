"""Masks that the tests of this directory share: those of all kernels that are square, and a few more."""

from tests.support.cases import MASKS, Case, random_disjoint, varlen

SQUARE = {
    case.name: case
    for case in [
        *(case for case in MASKS if case.seqlen_q == case.seqlen_k),
        Case("nobody_sees_anything", 130, 130, []),
        *(random_disjoint(257, 257, seed) for seed in range(4)),
        random_disjoint(600, 600, seed=5, num_cuts=12),
    ]
}

#: The last quarter sees everything, the others 8 tokens each: of ranks in order, one alone needs what others hold.
LAST_SEES_ALL = Case(
    "last_sees_all",
    320,
    320,
    [*((i, i + 8, i, i + 8, 0) for i in range(0, 240, 8)), (240, 320, 0, 320, 0)],
)


def documents(lengths, causal):
    return varlen("documents", lengths, int(causal)).slices()
