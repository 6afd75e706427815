"""The programs that prepare a mask's launches find a GPU where there is none."""

import pytest

from magi_compile import _checks


@pytest.fixture
def no_flags(monkeypatch):
    mask_slices = pytest.importorskip("magi_compile.kernels.sm90.masks.mask_slices")
    monkeypatch.setattr(_checks, "_flags", {})
    monkeypatch.setattr(mask_slices, "_prepared", {})  # they know where the flags are
    monkeypatch.setattr(mask_slices, "load_function", lambda variant, device: variant)
    monkeypatch.setattr(mask_slices, "max_resident_blocks", lambda *_: 132)
    mask_bits = pytest.importorskip("magi_compile.kernels.sm90.masks.mask_bits")
    monkeypatch.setattr(mask_bits, "_prepared", {})
    monkeypatch.setattr(mask_bits, "load_function", lambda variant, device: variant)
