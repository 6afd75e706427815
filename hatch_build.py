"""Build hook of pyproject.toml: kernels that are compiled ahead, into the wheel.

Only where `MAGI_COMPILE_BUILD_CUBINS` names their head dimensions, as `64,128,256`; editable installs have none. NVRTC
needs no GPU, and the wheel stays one for all machines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILER = ("cuda-bindings", "nvidia-cuda-nvrtc")


def head_dims() -> list[str]:
    """The head dimensions of the kernels that this build is asked for."""
    return os.environ.get("MAGI_COMPILE_BUILD_CUBINS", "").replace(",", " ").split()


class CubinsHook(BuildHookInterface):
    """Compiles the kernels from the sources that the wheel is built of."""

    def dependencies(self) -> list[str]:
        """What the build environment needs: the compiler in the version that the tests run with."""
        if not head_dims():
            return []
        of_tests = self.metadata.core.optional_dependencies["dev"]
        compiler = [x for x in of_tests if re.match(r"[\w-]+", x)[0] in COMPILER]
        return [*self.metadata.core.dependencies, *compiler]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not head_dims() or version == "editable":
            return
        self.made = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "magi_compile.warm_up", "--into", self.made.name]
        subprocess.run([*command, "--head-dims", *head_dims()], cwd=self.root, check=True)
        build_data["force_include"][self.made.name] = "magi_compile/cubins"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if made := getattr(self, "made", None):
            made.cleanup()
