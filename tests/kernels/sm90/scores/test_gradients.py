"""Gradients of captured tensors by the Hopper kernels, as they are, on a CPU, against dense attention in fp64."""

import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from tests.kernels.support.scored_calls import (
    BY_HEAD,
    CAUSAL,
    DOCUMENTS,
    FULL,
    SCATTERED,
    check,
)
from tests.score.score_mods import CASES

LEARNED = {case.name: case for case in CASES if any(x.is_floating_point() for x in case.captures)}


@pytest.mark.parametrize("name", LEARNED)
def test_programs(name, kernel):
    check(kernel, LEARNED[name], CAUSAL)


@pytest.mark.parametrize("mask", [FULL, DOCUMENTS, SCATTERED, BY_HEAD], ids=lambda mask: mask.name)
@pytest.mark.parametrize("name", ["alibi", "relative", "learned", "documents"])
def test_masks(name, mask, kernel):
    check(kernel, LEARNED[name], mask)
