"""Every mask_mod and score_mod of attention-gym is right, and runs as docs/published.md says."""

import pytest

pytest.importorskip("attn_gym", reason="needs attention-gym: pip install attn-gym")

from tests.programs.attention_gym import MASKS, SCORES
from tests.programs.variants import assert_as_documented


@pytest.mark.parametrize("variant", [*MASKS, *SCORES], ids=lambda variant: variant.name)
def test_variant(variant):
    assert_as_documented(variant)
