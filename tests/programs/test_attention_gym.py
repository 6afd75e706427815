"""Every mask_mod and score_mod of attention-gym is right, and runs as docs/published.md says; every second one by
default, where PyTorch's own examples and the masks of `magi-bench mods` are others of their kind."""

import pytest

pytest.importorskip("attn_gym", reason="needs attention-gym: pip install attn-gym")

from tests.programs.attention_gym import MASKS, SCORES
from tests.programs.variants import assert_as_documented
from tests.support.pairwise import sparsely

VARIANTS = [*MASKS, *SCORES]


@pytest.mark.parametrize(
    "variant", sparsely([(x,) for x in VARIANTS], 2, [x.name for x in VARIANTS])
)
def test_variant(variant):
    assert_as_documented(variant)
