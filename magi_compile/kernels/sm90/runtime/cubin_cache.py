"""Compiled kernels on disk: what is read was written by this user, whole. Trouble with the disk costs time, nothing else."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from magi_compile._warnings import warn_once

_TROUBLE = (OSError, RuntimeError)  # the latter: nobody knows the user's home directory
MAGIC = b"magi_compile cubin 1\n"


def cache_dir() -> Path:
    """`$MAGI_COMPILE_CACHE_DIR`, or `magi_compile` in the user's cache directory."""
    if configured := os.environ.get("MAGI_COMPILE_CACHE_DIR"):
        return Path(configured).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "magi_compile"


def private_dir() -> Path:
    """The cache directory, made if it is not there.

    Returns:
        An absolute path.

    Raises:
        OSError: if it cannot be made, or if others can write to it.
    """
    directory = cache_dir()
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(f"others can write to {directory}")
    return directory


def read(name: str) -> bytes | None:
    """What `write` was given under `name`, or None where it is not there, not whole, or not to be trusted."""
    try:
        directory = cache_dir()
        if not directory.exists() or not _is_private(directory):
            return None
        written = (directory / name).read_bytes()
    except FileNotFoundError:
        return None
    except _TROUBLE as error:
        warn_once(
            f"cannot read compiled kernels from the disk, so they are compiled again: {error}"
        )
        return None
    begin = len(MAGIC) + hashlib.sha256().digest_size
    content = written[begin:]
    return content if written[:begin] == _header(content) else None


def write(name: str, content: bytes) -> None:
    """Keeps `content` under `name`, for this user alone, in place of what is there."""
    try:
        directory = cache_dir()
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(directory):
            return
        handle, path = tempfile.mkstemp(dir=directory)  # readable and writable by this user alone
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_header(content) + content)
            os.replace(path, directory / name)
        except OSError:
            os.unlink(path)
            raise
    except _TROUBLE as error:
        warn_once(
            "cannot write compiled kernels to the disk, so the next process compiles them again; "
            f"set MAGI_COMPILE_CACHE_DIR to another directory: {error}"
        )


def _header(content: bytes) -> bytes:
    return MAGIC + hashlib.sha256(content).digest()


def _is_private(directory: Path) -> bool:
    """Whether only this user can have put files into `directory`; if not, that is said."""
    status = directory.stat()
    if status.st_uid != os.geteuid():
        reason = f"it belongs to user {status.st_uid}, not to {os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = (
            f"others can write to it (mode {stat.S_IMODE(status.st_mode):o}); `chmod 700` ends that"
        )
    else:
        return True
    warn_once(
        f"the kernel cache {directory} is not used: {reason}; or set MAGI_COMPILE_CACHE_DIR to another directory"
    )
    return False
