"""Hooks of pyproject.toml for releases; installations from sources need none of this.

- Kernels that are compiled ahead, into the wheel, where `MAGI_COMPILE_BUILD_CUBINS` names their head dimensions, as
  `64,128,256`. Editable installs have none. NVRTC needs no GPU, and the wheel stays one for all machines.
- Addresses, where `MAGI_COMPILE_REPOSITORY` names the repository, as `https://github.com/OWNER/NAME`: those of the
  project, and those of files that README.md links to, because an index shows README.md without them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()#\s:]+)(#[^()\s]*)?\)")
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


class RepositoryHook(MetadataHookInterface):
    """README.md with absolute links, and the addresses of the project."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        text = (root / "README.md").read_text()
        if repository := os.environ.get("MAGI_COMPILE_REPOSITORY", "").rstrip("/"):
            version = re.search(
                r'"(.+)"', (root / "magi_compile" / "_version.py").read_text().splitlines()[-1]
            )[1]

            def absolute(link: re.Match) -> str:
                image, name, path, anchor = link.groups()
                kind = "raw" if image else "blob"
                return f"{image}{name}({repository}/{kind}/v{version}/{path}{anchor or ''})"

            text = LINK.sub(absolute, text)
            metadata["urls"] = {
                "Source": repository,
                "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
