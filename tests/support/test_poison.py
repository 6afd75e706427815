"""`poisoned_empty` fills what the named package allocates, and leaves others alone."""

import pytest
import torch

from tests.support.poison import poisoned_empty

ALLOCATIONS = [
    lambda: torch.empty(3),
    lambda: torch.empty_like(torch.ones(3)),
    lambda: torch.empty_strided((3,), (1,)),
    lambda: torch.empty_permuted((3,), (0,)),
    lambda: torch.ones(3).new_empty(3),
    lambda: torch.ones(3).new_empty_strided((3,), (1,)),
]


@pytest.mark.parametrize("allocate", ALLOCATIONS)
def test_poisons_inside_the_package(allocate):
    with poisoned_empty(package=__name__):
        assert allocate().isnan().all()


def test_poisons_integers():
    with poisoned_empty(package=__name__):
        assert (torch.empty(3, dtype=torch.int32) == -(2**31)).all()
        assert not torch.empty(3, dtype=torch.bool).any()


@pytest.mark.parametrize("package", ["somebody_else", __name__[:-1]])
def test_leaves_others_alone_and_restores(package, monkeypatch):
    before = torch.empty
    with poisoned_empty(package=package):
        assert not torch.empty(3).fill_(1).isnan().any()
        assert torch.empty is not before
        filled = torch.empty(1000, dtype=torch.int32)
        assert not (filled == -(2**31)).all()
    assert torch.empty is before
