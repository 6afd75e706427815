"""Compiled kernels and the launcher on disk: what is read was written under that name, whole, by this user or by root.
Trouble with the disk costs time, nothing else."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from magi_compile._warnings import warn_once

_TROUBLE = (OSError, RuntimeError)  # the latter: nobody knows the user's home directory
MAGIC = b"magi_compile cache 2\n"


def cache_dir() -> Path:
    """`$MAGI_COMPILE_CACHE_DIR`, or `magi_compile` in the user's cache directory."""
    if configured := os.environ.get("MAGI_COMPILE_CACHE_DIR"):
        return Path(configured).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "magi_compile"


def read(name: str) -> bytes | None:
    """Reads the content that `write` was given under `name`; None where it is not there, not whole, or not to be
    trusted."""
    file = opened(name)
    if file is None:
        return None
    with os.fdopen(file, "rb") as whole:
        return whole.read()[: -len(_seal(name, b""))]


def opened(name: str) -> int | None:
    """The file of what `read` returns, for a loader that reads it by itself and ignores what follows the content.

    Args:
        name: as for `read`.

    Returns:
        A descriptor at the beginning of the file, which the caller closes; None where `read` returns None.
    """
    try:  # `write` comes next, and tells what is wrong with the directory
        with _directory() as directory:
            # not a link to elsewhere; without waiting for somebody who writes to a pipe
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(name, flags, dir_fd=directory)
    except _TROUBLE:
        return None
    try:
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and _distrust(status) is None:
            with os.fdopen(file, "rb", closefd=False) as whole:
                written = whole.read()
            content = written[: -len(_seal(name, b""))]
            if written == content + _seal(name, content):
                os.lseek(file, 0, os.SEEK_SET)
                return file
    except OSError:
        pass
    os.close(file)
    return None


def write(name: str, content: bytes) -> None:
    """Keeps `content` under `name`, for this user alone, in place of what is there."""
    try:
        directory = cache_dir()
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        with _directory() as descriptor:
            _replace(descriptor, name, content + _seal(name, content))
    except _TROUBLE as error:
        # without the name of the file: this is said once
        reason = getattr(error, "strerror", None) or error
        warn_once(
            f"compiled kernels are not kept in {_place()}, so the next process compiles them again: {reason}; "
            "set MAGI_COMPILE_CACHE_DIR to another directory"
        )


def _replace(directory: int, name: str, written: bytes) -> None:
    """Puts a file in place of what has its name, at once.
    What a crash of the machine leaves of it has another digest."""
    temporary = f"tmp-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    file = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with os.fdopen(file, "wb") as new:
            if reason := _distrust(os.fstat(file)):
                raise PermissionError(f"a new file cannot be trusted: {reason}")
            new.write(written)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise


def _seal(name: str, content: bytes) -> bytes:
    """The bytes behind `content` in its file: the loader of libraries wants nothing in front of it."""
    return MAGIC + hashlib.sha256(f"{name}\0".encode() + content).digest()


def _place() -> str:
    try:
        return str(cache_dir())
    except RuntimeError:
        return "the user's home directory"


@contextmanager
def _directory() -> Iterator[int]:
    """A descriptor of the cache directory, which others cannot exchange while its files are read and written.

    Raises:
        OSError: if it cannot be opened, or if others can have put files into it.
    """
    directory = os.open(cache_dir(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        if reason := _distrust(os.fstat(directory)):
            raise PermissionError(reason)
        yield directory
    finally:
        os.close(directory)


def _distrust(status: os.stat_result) -> str | None:
    """The reason why others than this user and root can have written to a file or a directory; None if they cannot."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}); `chmod 700` ends that"
        )
    return None
