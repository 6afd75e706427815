"""Compiled kernels on disk: broken files, full disks, and who may write there."""

import logging
import os

import pytest

from magi_compile import _warnings
from magi_compile.kernels.sm90.runtime import cubin_cache

NAME, CUBIN = "kernel_0.cubin", bytes(range(256)) * 8


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(_warnings, "_said", set())
    return tmp_path / "above" / "cache"


def only_warning(caplog):
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    return record.message


def test_what_was_written_is_read():
    assert cubin_cache.read(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert cubin_cache.read(NAME) == CUBIN


@pytest.mark.parametrize(
    "damage",
    [
        lambda written: written[:-1],
        lambda written: written[:20],
        lambda written: b"",
        lambda written: written[:-1] + b"\0",
        lambda written: CUBIN,  # as it was written before there was a header
    ],
)
def test_a_broken_file_is_as_good_as_none(directory, damage):
    cubin_cache.write(NAME, CUBIN)
    path = directory / NAME
    path.write_bytes(damage(path.read_bytes()))
    assert cubin_cache.read(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert cubin_cache.read(NAME) == CUBIN


def test_a_disk_that_refuses_is_said_once(directory, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for _ in range(2):
        cubin_cache.write(NAME, CUBIN)
    assert "cannot write compiled kernels to the disk" in only_warning(caplog)
    assert "No space left on device" in only_warning(caplog)
    assert list(directory.iterdir()) == []


def test_a_directory_that_can_not_be(directory, caplog):
    directory.parent.parent.mkdir(exist_ok=True)
    directory.parent.write_text("a file")
    assert cubin_cache.read(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert "set MAGI_COMPILE_CACHE_DIR to another directory" in only_warning(caplog)


def test_a_file_that_can_not_be_read(directory, caplog):
    (directory / NAME).mkdir(parents=True)
    directory.chmod(0o700)
    assert cubin_cache.read(NAME) is None
    assert "cannot read compiled kernels" in only_warning(caplog)


def test_only_this_user_may_read_and_write(directory):
    mask = os.umask(0)
    try:
        cubin_cache.write(NAME, CUBIN)
    finally:
        os.umask(mask)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(directory, mode, caplog):
    cubin_cache.write(NAME, CUBIN)
    directory.chmod(mode)
    assert cubin_cache.read(NAME) is None
    cubin_cache.write("other.cubin", CUBIN)
    assert not (directory / "other.cubin").exists()
    assert f"others can write to it (mode {mode:o})" in only_warning(caplog)


def test_a_directory_of_somebody_else_is_refused(directory, monkeypatch, caplog):
    cubin_cache.write(NAME, CUBIN)
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    assert cubin_cache.read(NAME) is None
    assert "it belongs to user " in only_warning(caplog)


def test_without_a_home(monkeypatch, caplog):
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", "~nobody-of-this-name/kernels")
    cubin_cache.write(NAME, CUBIN)
    assert "cannot write compiled kernels to the disk" in only_warning(caplog)
    assert cubin_cache.read(NAME) is None


def test_places(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", "~/kernels")
    assert cubin_cache.cache_dir() == tmp_path / "kernels"
    monkeypatch.delenv("MAGI_COMPILE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cubin_cache.cache_dir() == tmp_path / ".cache" / "magi_compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cubin_cache.cache_dir() == tmp_path / "xdg" / "magi_compile"
