"""Without torchtitan, or with another version, the import says what works."""

import importlib.metadata
import sys

import pytest

NAME = "magi_compile.integrations.torchtitan"


def import_with(monkeypatch, version):
    def version_of(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    importlib.import_module(NAME)


@pytest.mark.parametrize(
    ("version", "got"), [(None, "none"), ("0.2.2", r"0\.2\.2"), ("0.4.0", r"0\.4\.0"), ("x", "x")]
)
def test_other_versions(monkeypatch, version, got):
    with pytest.raises(ImportError, match=rf"needs torchtitan 0\.3, got {got}: pip install"):
        import_with(monkeypatch, version)


def test_what_torchtitan_can_not_be_imported_with(monkeypatch):
    monkeypatch.setitem(sys.modules, "spmd_types", None)
    with pytest.raises(ImportError, match=r"needs PyTorch 2\.14 or later, got .*spmd_types"):
        import_with(monkeypatch, "0.3.0")
