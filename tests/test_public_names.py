"""What the package shows: every name has a home, and loads when it is asked for."""

import subprocess
import sys
import textwrap

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


@pytest.mark.gpu
@pytest.mark.parametrize(
    "module", ["magi_compile", "magi_compile.dtensor", "magi_compile.kernels.sm90.kernel"]
)
def test_an_import_leaves_cuda_to_forks(module):
    """Launchers that fork, as those of notebooks do, import first: a child may start CUDA then."""
    code = f"""
        import os, torch, {module}
        child = os.fork()
        if not child:
            torch.zeros(1, device="cuda")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
