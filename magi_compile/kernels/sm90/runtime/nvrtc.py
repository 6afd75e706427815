"""Compiling the sources in `csrc/` with NVRTC, once: the result is cached on disk. A wheel may bring it along.

The sources include nothing but each other, so neither a CUDA toolkit nor a GPU is needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from magi_compile.kernels.sm90.runtime import cubin_cache, shipped

ARCH = "sm_90a"
LEAST_VERSION = (12, 9)  # older ones do not know `--no-cache`; 12.6 spills registers as well


@dataclass(frozen=True)
class Variant:
    """One kernel to compile: a file of `csrc/sm90`, its entry point, the macros that specialise it, and headers that
    are made for it, by name; `is_exact` floats are those of IEEE 754, each operation rounded by itself."""

    source: str
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    may_spill: bool = False
    is_exact: bool = False

    @classmethod
    def of(cls, source: str, entry: str, defines: Mapping[str, object], **rest: Any) -> Variant:
        """The kernel with these macros, of which truth values are C++'s."""
        texts = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in defines.items()}
        return cls(source, entry, tuple(texts.items()), **rest)


@dataclass(frozen=True)
class Resources:
    """The assembler's report about a kernel."""

    registers: int
    spilled_bytes: int
    is_wgmma_serialized: bool


class CompileError(RuntimeError):
    """A kernel that does not compile, or compiles to something slow; the message holds the compiler's log."""


def compile_variant(variant: Variant) -> bytes:
    """The cubin of `variant`, from the package or from the cache if it is there.

    Args:
        variant: a source with all that it is specialised for.

    Returns:
        The bytes of the cubin.

    Raises:
        CompileError: if the compiler refuses the source, serialises wgmma, or spills registers and `may_spill` is
            False.
    """
    found = shipped.read(shipped_name(variant))
    if found is not None:
        return found
    name = f"{variant.entry}_{_key(variant)}.cubin"
    kept = cubin_cache.read(name)
    if kept is not None:
        return kept
    cubin = compile_anew(variant)
    # Somebody may have edited the sources, or gone to another commit, since the name was made of them.
    if _digest_now() == _digest_of_sources():
        cubin_cache.write(name, cubin)
    return cubin


def shipped_name(variant: Variant) -> str:
    """The file of `variant` in a wheel: whatever compiler made it, of these sources and options."""
    return f"{variant.entry}_{_digest(variant)}.cubin"


def compile_anew(variant: Variant) -> bytes:
    """`compile_variant` by NVRTC, whatever is at hand."""
    cubin, log = run_nvrtc(variant)
    resources = parse_resources(log)
    if resources.spilled_bytes and not variant.may_spill:
        raise CompileError(f"{variant} spills {resources.spilled_bytes} bytes of registers:\n{log}")
    if resources.is_wgmma_serialized:
        raise CompileError(f"the compiler serialised the wgmma instructions of {variant}:\n{log}")
    return cubin


def run_nvrtc(variant: Variant) -> tuple[bytes, str]:
    """Compile `variant`, whatever the cache holds: the cubin and the log, with the assembler's report in it."""
    source = (source_dir() / variant.source).read_bytes()
    names = [name.encode() for name, _ in variant.headers]
    texts = [text.encode() for _, text in variant.headers]
    program = _check(
        nvrtc.nvrtcCreateProgram(source, variant.source.encode(), len(names), texts, names)
    )
    options = [option.encode() for option in _options(variant)]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _buffer(_check(nvrtc.nvrtcGetProgramLogSize(program)))
    _check(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode().rstrip("\0 \n")
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{variant} does not compile ({result.name}):\n{text}")
    cubin = _buffer(size := _check(nvrtc.nvrtcGetCUBINSize(program)))
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return cubin[:size], text


def parse_resources(log: str) -> Resources:
    """Read the assembler's report (`ptxas -v`) of a log with one kernel."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or spills is None:
        raise CompileError(f"the compiler's log has no resource report:\n{log}")
    return Resources(
        registers=int(registers[1]),
        spilled_bytes=int(spills[1]) + int(spills[2]),
        is_wgmma_serialized="wgmma.mma_async instructions are serialized" in log,
    )


@cache
def source_dir() -> Path:
    """The folder of the CUDA sources: in the wheel they lie inside the package, in a checkout beside it."""
    package = Path(__file__).parents[3]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "sm90").is_dir():
            return candidate / "sm90"
    raise FileNotFoundError(
        f"no CUDA sources in {package / 'csrc'} nor in {package.parent / 'csrc'}"
    )


def _options(variant: Variant) -> list[str]:
    return [
        f"--gpu-architecture={ARCH}",
        "-std=c++20",
        "--fmad=false" if variant.is_exact else "--use_fast_math",
        f"-I{source_dir()}",
        "--ptxas-options=-v",
        "--no-cache",  # what NVRTC takes from its own cache comes without the assembler's report
        *(f"-D{name}={value}" for name, value in variant.defines),
    ]


@cache
def _key(variant: Variant) -> str:
    major, minor = _version()
    return f"{_digest(variant)}_{major}.{minor}"


@cache
def _digest(variant: Variant) -> str:
    """Of all that a compiler reads."""
    made_of = f"{variant} {ARCH} {_digest_of_sources()}"
    return hashlib.sha256(made_of.encode()).hexdigest()[:24]


@cache
def _digest_of_sources() -> str:
    return _digest_now()


def _digest_now() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())  # the options
    for path in sorted(source_dir().rglob("*.cu*")):
        digest.update(path.relative_to(source_dir()).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _version() -> tuple[int, int]:
    """NVRTC's own. Raises CompileError if it is not there, or too old."""
    least = "{}.{}".format(*LEAST_VERSION)
    what = f"NVRTC, the compiler of the Hopper kernels, must be of CUDA {least} or later"
    helps = (
        f"it comes with PyTorch: install PyTorch for CUDA {least} or later, or the compiler alone, `pip install "
        f"'nvidia-cuda-nvrtc-cu12>={least}'`, or ask for kernel 'triton', which does not need it"
    )
    try:
        version = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # of cuda-bindings, which finds no library
        raise CompileError(f"{what}, got none ({error}); {helps}") from error
    major, minor = _check(version)
    if (major, minor) < LEAST_VERSION:
        raise CompileError(f"{what}, got {major}.{minor}; {helps}")
    return major, minor


def _buffer(size: int) -> bytes:
    """Memory for NVRTC to write to: never an object of one byte, which Python shares with everybody."""
    return bytes(size + 1)


def _check(result):
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC failed: {status.name}")
    return values[0] if len(values) == 1 else values
