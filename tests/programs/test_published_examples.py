"""PyTorch's published examples of FlexAttention are right, and run as docs/published.md says."""

import pytest

from tests.programs.published_examples import MASKS, SCORES
from tests.programs.variants import assert_as_documented


@pytest.mark.parametrize("variant", [*MASKS, *SCORES], ids=lambda variant: variant.name)
def test_variant(variant):
    assert_as_documented(variant)
