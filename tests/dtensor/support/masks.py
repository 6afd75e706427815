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


def documents(lengths, causal):
    return varlen("documents", lengths, int(causal)).slices()
