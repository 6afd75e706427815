"""Compiled kernels that a wheel brings along, in `magi_compile/cubins`. Source checkouts have none.

The manifest beside them says which compiler made them, and the SHA-256 of each. It shows damage: who can write there
can write to the package's code too. Nothing is written into an installed package.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cuda.bindings import driver

from magi_compile._warnings import warn_once

logger = logging.getLogger("magi_compile")

MANIFEST = "made_by.json"


def folder() -> Path:
    """The place of the kernels inside the package."""
    return Path(__file__).parents[3] / "cubins"


def read(name: str) -> bytes | None:
    """The kernel of that name; None where the wheel has none, where it is damaged, which is a warning, or where this
    machine's driver is older than the compiler that made it."""
    digest = _digests().get(name)
    if digest is None:
        return None
    try:
        cubin = (folder() / name).read_bytes()
    except OSError as error:
        _warn_of_damage(f"{name} cannot be read: {error.strerror}")
        return None
    if (found := hashlib.sha256(cubin).hexdigest()) != digest:
        _warn_of_damage(f"{name} has the SHA-256 {found}, and must have {digest}")
        return None
    return cubin


def write(to: Path, cubins: Mapping[str, bytes]) -> None:
    """Writes kernels by name, and their manifest, into a new or an empty folder.

    Args:
        to: the folder.
        cubins: the kernels, all by one compiler.

    Raises:
        ValueError: if the folder is not empty.
    """
    to.mkdir(parents=True, exist_ok=True)
    if any(to.iterdir()):
        raise ValueError(f"the folder for kernels must be empty, got {to}")
    for name, cubin in cubins.items():
        (to / name).write_bytes(cubin)
    (compiler,) = {_compiler_of(cubin) for cubin in cubins.values()}
    digests = {name: hashlib.sha256(cubins[name]).hexdigest() for name in sorted(cubins)}
    manifest = {"compiler": compiler, "sha256": digests}
    (to / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _compiler_of(cubin: bytes) -> str:
    """The exact version that an assembler leaves in its work, as 13.0.88."""
    found = re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin)
    if found is None:
        raise ValueError("a cubin must name the version of its compiler")
    return found[1].decode()


def _digests() -> Mapping[str, str]:
    """The kernels that this process may take, with the SHA-256 of each."""
    return {} if os.environ.get("MAGI_COMPILE_CUBINS", "1") == "0" else _usable()


@cache
def _usable() -> Mapping[str, str]:
    try:
        manifest = json.loads((folder() / MANIFEST).read_text())
        compiler, digests = manifest["compiler"], dict(manifest["sha256"])
        major = int(compiler.split(".")[0])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _warn_of_damage(f"{MANIFEST} cannot be read: {error!r}")
        return {}
    runs = _major_of_driver()
    if runs is not None and runs < major:
        logger.info(
            "kernels are compiled here: those of the wheel need a driver for CUDA %s, got one for CUDA %s",
            major,
            runs,
        )
        return {}
    return digests


def _major_of_driver() -> int | None:
    """The CUDA version that the driver is made for; None where there is no driver, as where an image is built."""
    try:
        status, version = driver.cuDriverGetVersion()
    except RuntimeError:
        return None
    return version // 1000 if status == driver.CUresult.CUDA_SUCCESS else None


def _warn_of_damage(what: str) -> None:
    warn_once(
        f"kernels that came with magi_compile are damaged and compiled again: in {folder()}, {what}; install the "
        "package anew"
    )
