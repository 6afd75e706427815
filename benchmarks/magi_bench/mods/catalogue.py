"""All mods, by name."""

from __future__ import annotations

from magi_bench.mods.masks import MASKS
from magi_bench.mods.mod import Mod
from magi_bench.mods.scores import SCORES

MODS = {
    build.__name__: Mod.of(kind, build)
    for kind, builds in (("mask", MASKS), ("score", SCORES))
    for build in builds
}
