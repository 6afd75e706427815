"""The arrows go one way: functions -> masks -> score -> plan -> kernels -> ops -> lowering -> dtensor ->
integrations."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "magi_compile"
BENCH = PACKAGE.parent / "benchmarks" / "magi_bench"  # imports the package, and the package not it
LAYERS = [
    "functions",
    "masks",
    "score",
    "plan",
    "kernels",
    "ops",
    "lowering",
    "dtensor",
    "integrations",
]
# The rooms and files of `masks/`, in which arrows go one way too.
MASKS = [
    *("arguments", "bits", "errors", "geometry", "normal_form", "slices"),
    *("expr", "solver", "program", "evaluation", "library", "picture", "block_mask", "selection"),
    "shared_prefixes",
]
# Beside the layers: `_version`, `_compat`, `_checks`, `_kept` and `_warnings` are leaves that anybody may import.


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imported_modules(path: Path) -> set[str]:
    """The `magi_compile.*` modules that a file imports anywhere, also inside functions."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} uses a relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in (PACKAGE.name, BENCH.name)}


def layered_files() -> list[Path]:
    return [path for layer in LAYERS for path in sorted((PACKAGE / layer).rglob("*.py"))]


def test_imports_only_from_the_left():
    offenders = []
    for path in layered_files():
        own = LAYERS.index(path.relative_to(PACKAGE).parts[0])
        for name in imported_modules(path):
            layer = name.split(".")[1] if "." in name else ""
            is_right = layer in LAYERS and LAYERS.index(layer) > own
            offenders += [f"{path} imports {name}"] if is_right else []
    assert offenders == []


def test_no_room_of_masks_imports_one_to_its_right():
    masks = PACKAGE / "masks"
    files = [path for path in masks.rglob("*.py") if path != masks / "__init__.py"]  # its face
    for path in files:
        own = MASKS.index(path.relative_to(masks).parts[0].removesuffix(".py"))
        names = [name.split(".") for name in imported_modules(path)]
        rooms = {
            parts[2] for parts in names if parts[:2] == [PACKAGE.name, "masks"] and len(parts) > 2
        }
        assert all(MASKS.index(room) <= own for room in rooms), f"{path} imports {rooms}"


def test_cuda_folders_include_no_circle():
    cuda = PACKAGE.parent / "csrc" / "sm90"
    included: dict[str, set[str]] = {}
    for path in cuda.rglob("*.cu*"):
        names = re.findall(r'^#include "(.+)/[^/]+"', path.read_text(), re.MULTILINE)
        included.setdefault(str(path.parent.relative_to(cuda)), set()).update(names)
    order = TopologicalSorter({folder: names - {folder} for folder, names in included.items()})
    assert "common" in list(order.static_order())  # which raises CycleError


def test_rooms_of_hopper_kernels_import_no_circle():
    room = "magi_compile.kernels.sm90."
    imported: dict[str, set[str]] = {}
    for path in (PACKAGE / "kernels" / "sm90").rglob("*/*.py"):
        names = {x.removeprefix(room).split(".")[0] for x in imported_modules(path) if room in x}
        imported.setdefault(path.parent.name, set()).update(names)
    order = TopologicalSorter({x: (names & set(imported)) - {x} for x, names in imported.items()})
    assert "runtime" in list(order.static_order())  # which raises CycleError


def test_no_layer_imports_the_face_of_the_package():
    def plain(path: Path) -> set[str]:
        imports = [x for x in nodes(path) if isinstance(x, ast.Import)]
        return {alias.name for node in imports for alias in node.names}

    assert [str(path) for path in layered_files() if PACKAGE.name in plain(path)] == []


def test_nothing_imports_the_benchmark():
    for path in PACKAGE.rglob("*.py"):
        assert not [name for name in imported_modules(path) if name.split(".")[0] == BENCH.name]


def test_leaves_import_nothing_of_ours():
    assert imported_modules(PACKAGE / "_version.py") == set()
    for path in (PACKAGE / "_compat").glob("*.py"):
        for name in imported_modules(path):
            assert name.startswith("magi_compile._compat."), f"{path} imports {name}"
    assert imported_modules(PACKAGE / "_warnings.py") == set()
    for name in ("_checks.py", "_kept.py"):
        assert imported_modules(PACKAGE / name) == {"magi_compile", "magi_compile._compat"}


FRAMEWORKS = {"transformers", "torchtitan", "accelerate", "trl", "peft"}
TRAINERS = {"transformers", "accelerate"}  # whose classes are one trainer

EVERY_FILE = sorted(PACKAGE.rglob("*.py")) + sorted(BENCH.rglob("*.py"))


def test_frameworks_only_in_integrations_of_their_name():
    """Only modules of `integrations` and of magi_bench's `doors` import a framework,
    the one that they are called after."""
    offenders = []
    for path in EVERY_FILE:
        found = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
        own = {path.stem} if path.parent.name in ("integrations", "doors") else set()
        own |= TRAINERS if path == PACKAGE / "integrations" / "trainer.py" else set()
        offenders += [f"{path} imports {name}" for name in (found & FRAMEWORKS) - own]
    assert offenders == []


# Documented entry points below private-looking module names.
DOCUMENTED = {
    "torch._dynamo.lookup_backend",
    "torch._inductor.compile",
    "torch._inductor.list_mode_options",
}


def private_torch_names(path: Path) -> set[str]:
    """The names of PyTorch's that nobody documents and a file uses."""
    found = set()
    for node in nodes(path):
        name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        parts = name.split(".")
        if parts[0] != "torch" or parts[1] == "ops":
            continue
        private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        documented = any(full.startswith(name) or name.startswith(full) for full in DOCUMENTED)
        found |= {name} if private and not documented else set()
    return found


def test_private_torch_names_only_in_compat():
    elsewhere = [path for path in EVERY_FILE if path.parent.name != "_compat"]
    offenders = [f"{path}: {name}" for path in elsewhere for name in private_torch_names(path)]
    assert offenders == [], "belongs in _compat/"


def test_import_touches_no_gpu_and_no_kernel():
    program = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import magi_compile\n"
        "assert not torch.cuda.is_initialized()\n"
        "ours = [m for m in sys.modules if m.startswith('magi_compile.')]\n"
        "assert ours == ['magi_compile._version'], 'not lazy'\n"
        "import magi_compile.kernels.select, magi_compile.ops\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not {'triton', 'cuda.bindings.driver'} & (set(sys.modules) - before)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
