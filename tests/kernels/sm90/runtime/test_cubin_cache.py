"""Compiled kernels and the launcher on disk: broken files, full disks, and who may write there."""

import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from magi_compile import _warnings
from magi_compile.kernels.sm90.runtime import cubin_cache

NAME, CUBIN = "kernel_0.cubin", bytes(range(256)) * 8


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(_warnings, "_said", set())
    return tmp_path / "above" / "cache"


def owned_by(monkeypatch, uid, is_kind):
    """Files, or directories, belong to another user."""
    fstat = os.fstat

    def others(descriptor):
        status = fstat(descriptor)
        if not is_kind(status.st_mode):
            return status
        return os.stat_result((*status[:4], uid, *status[5:10]))

    monkeypatch.setattr(os, "fstat", others)


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
        lambda written: CUBIN,
        lambda written: b"\1" + written[1:],
        lambda written: written + b"\0",
    ],
)
def test_a_broken_file_is_as_good_as_none(directory, damage):
    cubin_cache.write(NAME, CUBIN)
    path = directory / NAME
    path.write_bytes(damage(path.read_bytes()))
    assert cubin_cache.read(NAME) is None
    assert cubin_cache.opened(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert cubin_cache.read(NAME) == CUBIN


def test_a_file_by_another_name_is_as_good_as_none(directory):
    """Where others could write once, they may have exchanged this user's own files."""
    cubin_cache.write(NAME, CUBIN)
    (directory / NAME).rename(directory / "kernel_1.cubin")
    assert cubin_cache.read("kernel_1.cubin") is None


def put_link(path):
    cubin_cache.write("elsewhere", CUBIN)
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("put", [put_link, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_is_replaced(directory, put):
    directory.mkdir(parents=True, mode=0o700)
    put(directory / NAME)
    assert cubin_cache.read(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert cubin_cache.read(NAME) == CUBIN
    assert stat.S_ISREG((directory / NAME).lstat().st_mode)


def test_a_disk_that_refuses_is_said_once(directory, caplog, monkeypatch):
    def full(old, new, **_):
        raise OSError(28, "No space left on device", old)

    monkeypatch.setattr(os, "replace", full)
    for name in (NAME, "other.cubin"):
        cubin_cache.write(name, CUBIN)
        assert cubin_cache.read(name) is None
    assert f"kernels are not kept in {directory}, so" in only_warning(caplog)
    assert "No space left on device" in only_warning(caplog)
    assert list(directory.iterdir()) == []


def test_an_interrupt_leaves_nothing(directory, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cubin_cache.write(NAME, CUBIN)
    assert list(directory.iterdir()) == []


def test_a_directory_that_can_not_be(directory, caplog):
    directory.parent.parent.mkdir(exist_ok=True)
    directory.parent.write_text("a file")
    assert cubin_cache.read(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert "set MAGI_COMPILE_CACHE_DIR to another directory" in only_warning(caplog)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_to_read_only(directory, caplog):
    cubin_cache.write(NAME, CUBIN)
    directory.chmod(0o500)
    assert cubin_cache.read(NAME) == CUBIN
    for name in ("other.cubin", "third.cubin"):
        cubin_cache.write(name, CUBIN)
    assert "Permission denied" in only_warning(caplog)
    directory.chmod(0o700)


def test_a_directory_in_place_of_a_file(directory, caplog):
    (directory / NAME).mkdir(parents=True)
    directory.chmod(0o700)
    assert cubin_cache.read(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert "are not kept in" in only_warning(caplog)
    assert os.listdir(directory) == [NAME]


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


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_to_is_replaced(directory, mode):
    cubin_cache.write(NAME, CUBIN)
    (directory / NAME).chmod(mode)
    assert cubin_cache.read(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert cubin_cache.read(NAME) == CUBIN


def test_a_directory_of_somebody_else_is_refused(directory, monkeypatch, caplog):
    cubin_cache.write(NAME, CUBIN)
    owned_by(monkeypatch, os.geteuid() + 1, stat.S_ISDIR)
    assert cubin_cache.read(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert f"it belongs to user {os.geteuid() + 1}, not to {os.geteuid()}" in only_warning(caplog)


def test_files_of_somebody_else_are_not_read(monkeypatch, caplog):
    """As in a directory that was open to all before `chmod 700`, or on a disk that gives new files to nobody."""
    cubin_cache.write(NAME, CUBIN)
    owned_by(monkeypatch, os.geteuid() + 1, stat.S_ISREG)
    assert cubin_cache.read(NAME) is None
    assert cubin_cache.opened(NAME) is None
    cubin_cache.write(NAME, CUBIN)
    assert "a new file cannot be trusted: it belongs to user " in only_warning(caplog)


def test_roots_files_are_read(directory, monkeypatch):
    """Those of an image; root could write to any other file as well."""
    cubin_cache.write(NAME, CUBIN)
    directory.chmod(0o755)
    (directory / NAME).chmod(0o644)
    owned_by(monkeypatch, 0, lambda mode: True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert cubin_cache.read(NAME) == CUBIN


def test_an_opened_file_is_that_which_was_verified(directory):
    cubin_cache.write(NAME, CUBIN)
    file = cubin_cache.opened(NAME)
    cubin_cache.write(NAME, b"other")
    assert Path(f"/proc/self/fd/{file}").read_bytes().startswith(CUBIN)
    os.close(file)


def test_many_write_at_once(directory):
    contents = [bytes([i]) * 100_000 for i in range(4)]
    wrong = []

    def work(content):
        for _ in range(20):
            cubin_cache.write(NAME, content)
            if cubin_cache.read(NAME) not in contents:
                wrong.append(content[:1])

    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert os.listdir(directory) == [NAME]


def test_descriptors_are_closed(directory):
    before = len(os.listdir("/proc/self/fd"))
    for damage in (b"", b"broken", None):
        cubin_cache.write(NAME, CUBIN)
        if damage is not None:
            (directory / NAME).write_bytes(damage)
        cubin_cache.read(NAME)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_home(monkeypatch, caplog):
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", "~nobody-of-this-name/kernels")
    assert cubin_cache.read(NAME) is None
    for name in (NAME, "other.cubin"):
        cubin_cache.write(name, CUBIN)
    assert "Could not determine home directory" in only_warning(caplog)


def test_places(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", "~/kernels")
    assert cubin_cache.cache_dir() == tmp_path / "kernels"
    monkeypatch.delenv("MAGI_COMPILE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cubin_cache.cache_dir() == tmp_path / ".cache" / "magi_compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cubin_cache.cache_dir() == tmp_path / "xdg" / "magi_compile"
