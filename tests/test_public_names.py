"""What the package shows: every name has a home, and loads when it is asked for."""

import pytest

import magi_compile


def test_every_public_name_has_a_home():
    for name in magi_compile.__all__:
        assert getattr(magi_compile, name) is not None
    assert set(magi_compile.__all__) <= set(dir(magi_compile))
    lazy = {*magi_compile._HOMES, *magi_compile._PACKAGES}
    assert lazy == set(magi_compile.__all__) - {"__version__"}


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("LoweringRefusedError", NotImplementedError),
        ("MaskDataError", ValueError),
        ("UnsupportedMaskError", NotImplementedError),
        ("UnsupportedScoreModError", NotImplementedError),
    ],
)
def test_exceptions_that_users_meet_are_public(name, base):
    assert name in magi_compile.__all__
    assert issubclass(getattr(magi_compile, name), base)


def test_something_else():
    with pytest.raises(AttributeError, match="has no attribute 'flash'"):
        magi_compile.flash  # noqa: B018
