"""The provenance of numbers: the machine, its software and the command, for the record of every run."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import magi_compile

PEERS = ("triton", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend")


def describe(device: str, command: list[str]) -> dict[str, Any]:
    """Everything that a reader needs to repeat a run; no paths and no names of machines."""
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "device": device_name(device),
        "magi_compile": magi_compile.__version__,
        "commit": _commit(),
        "source": _source_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        record |= {
            "card": hashlib.sha256(str(properties.uuid).encode()).hexdigest()[:6],
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _nvidia_smi("driver_version"),
            "power_limit": _nvidia_smi("power.limit"),
            "max_sm_clock": _nvidia_smi("clocks.max.sm"),
            "num_sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return record


def versions() -> dict[str, str]:
    """The versions of those packages of `PEERS` that are installed."""
    found = {}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: str) -> str:
    """The name that the GPU or the processor reports."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpus = Path("/proc/cpuinfo")
    for line in cpus.read_text().splitlines() if cpus.exists() else ():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()} ({os.cpu_count()} cores)"
    return platform.machine()


def gpu_state() -> dict[str, int] | None:
    """Clock, power and temperature now; None where they cannot be read (PyTorch asks the package nvidia-ml-py)."""
    try:
        return {
            "sm_mhz": torch.cuda.clock_rate(),
            "power_w": torch.cuda.power_draw() // 1000,
            "temperature_c": torch.cuda.temperature(),
        }
    except (ModuleNotFoundError, RuntimeError):
        return None


def _said(*command: str, where: Path | None = None) -> str:
    """The output of a command, or "unknown"."""
    options = {"capture_output": True, "text": True, "timeout": 10, "check": True, "cwd": where}
    try:
        return subprocess.run(command, **options).stdout.strip()  # type: ignore[call-overload,no-any-return]
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _nvidia_smi(query: str) -> str:
    return _said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0")


def _commit() -> str:
    """The commit of the checkout that magi_compile lies in, "+" behind it if files differ."""
    root = Path(magi_compile.__file__).parents[1]
    head = _said("git", "rev-parse", "--short", "HEAD", where=root)
    is_changed = _said("git", "status", "--porcelain", "-uno", where=root) not in ("", "unknown")
    return head + "+" * is_changed


def _source_hash() -> str:
    """Hashes the package's code and its CUDA sources: what ran, whatever version control says."""
    package = Path(magi_compile.__file__).parent
    sources = package / "csrc" if (package / "csrc").exists() else package.parent / "csrc"
    files = {
        file.relative_to(root.parent).as_posix(): file
        for root, pattern in ((package, "*.py"), (sources, "*.cu"), (sources, "*.cuh"))
        for file in root.rglob(pattern)
    }
    digest = hashlib.sha256()
    for _, file in sorted(files.items()):  # file systems list them in an order of their own
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
