"""Every variant of the CUDA kernels compiles, without spills and with asynchronous wgmma,
on a machine without a GPU."""

import itertools
import os
import subprocess
import tempfile
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from magi_compile import warm_up
from magi_compile.kernels.base import AttnProblem
from magi_compile.kernels.heuristics import HOPPER_HEAD_DIMS, forward_config
from magi_compile.kernels.sm90.backward.variants import backward_variants
from magi_compile.kernels.sm90.forward.launch import forward_variant
from magi_compile.kernels.sm90.runtime import launcher_build, nvrtc
from tests.kernels.support.cpp import kept_for_later

VARIANTS = list(warm_up.variants())


def with_max_scores():
    """Not built ahead: each is compiled when it is asked for, and fails there if it spills."""
    for head_dim, (softcap, has_bits, is_early) in itertools.product(
        HOPPER_HEAD_DIMS, [(0.0, False, False), (1.0, True, False), (1.0, False, True)]
    ):
        problem = AttnProblem(
            *("cuda", (9, 0), torch.bfloat16, 1, 1, head_dim, head_dim, 1.0, softcap),
            has_bits=has_bits,
            has_max_scores=True,
        )
        config = forward_config(problem)
        yield forward_variant(problem, config, has_stairs=is_early, is_early=is_early)


VARIANTS_WITH_MAX_SCORES = list(with_max_scores())


def of_other_head_dims():
    """Not built ahead either. Some other sizes spill a few registers, which is no error there."""
    for head_dim, head_dim_v in ((80, 80), (192, 128)):
        problem = AttnProblem(
            "cuda", (9, 0), torch.bfloat16, 1, 1, head_dim, head_dim_v, head_dim**-0.5
        )
        yield forward_variant(problem, forward_config(problem))
        yield from backward_variants(problem)


VARIANTS_OF_OTHER_HEAD_DIMS = list(of_other_head_dims())


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", str(tmp_path))


# By entry, head_dim, lines of a block map, and intervals beside it or a table: producers have few registers for its
# words.
SPILLED_BYTES = {
    ("ffa_backward", "192", "1", "0"): 32,
    ("ffa_backward", "192", "2", "0"): 404,
    ("ffa_backward", "256", "2", "0"): 24,
    ("ffa_backward", "96", "2", "1"): 24,
    ("ffa_backward", "128", "2", "1"): 40,
    ("ffa_backward", "192", "2", "1"): 400,
    ("ffa_backward", "256", "2", "1"): 36,
    ("ffa_backward", "96", "2", "table"): 24,
    ("ffa_backward", "128", "2", "table"): 32,
    ("ffa_backward", "192", "2", "table"): 524,
    ("ffa_backward", "256", "2", "table"): 24,
}


def variant_id(variant):
    defines = dict(variant.defines)
    softcap = "softcap" if defines.get("FFA_HAS_SOFTCAP") == "true" else None
    bits = "bits" if defines.get("FFA_HAS_BITS") == "true" else None
    largest = "max_scores" if defines.get("FFA_HAS_MAX_SCORES") == "true" else None
    lists = f"lists{defines['FFA_MAP_LINES']}" if defines.get("FFA_MAP_LINES", "0") != "0" else None
    beside = "intervals" if defines.get("FFA_MAP_INTERVALS", "0") != "0" else None
    beside = "table" if defines.get("FFA_MAP_TABLE") == "true" else beside
    order = "deterministic" if defines.get("FFA_IS_DETERMINISTIC") == "true" else None
    has_remote = defines.get("FFA_IS_EARLY") == "true"
    cols = defines.get("FFA_COLS", defines.get("FFA_HEAD_DIM"))
    names = (variant.entry, defines.get("FFA_ELEMENT"), cols, defines.get("FFA_COLS_OF_V"))
    parts = (*names, softcap, bits, lists, beside, largest, order, "remote" if has_remote else None)
    return "-".join(part for part in parts if part)


def is_slow(variant):
    """The default compiles all of bf16 without a soft-cap at four head dimensions, of the fifth, of fp16, of a soft-cap
    and of largest scores some: bits and an order of additions need registers most."""
    defines = dict(variant.defines)
    head_dim = (
        defines.get("FFA_HEAD_DIM") or defines.get("FFA_COLS") or defines.get("FFA_COLS_OF_V")
    )
    is_half = defines.get("FFA_ELEMENT") == "float16"
    has_softcap = defines.get("FFA_HAS_SOFTCAP") == "true"
    is_largest = all(
        defines.get(name, "true") == "true" for name in ("FFA_HAS_BITS", "FFA_IS_DETERMINISTIC")
    )
    if defines.get("FFA_HAS_MAX_SCORES") == "true":
        return not is_largest and head_dim != "256"
    if is_half or has_softcap:
        of_dims = {(True, False): ("64",), (False, True): ("128", "256"), (True, True): ()}
        return not (is_largest and head_dim in of_dims[is_half, has_softcap])
    asks = defines.get("FFA_MAP_INTERVALS", "0") != "0" or defines.get("FFA_MAP_TABLE") == "true"
    return (head_dim == "96" and not is_largest) or (asks and head_dim in ("64", "96"))


EVERY_VARIANT = [
    pytest.param(x, marks=pytest.mark.slow) if is_slow(x) else x
    for x in VARIANTS + VARIANTS_WITH_MAX_SCORES
]


@pytest.mark.parametrize("variant", [*EVERY_VARIANT, *VARIANTS_OF_OTHER_HEAD_DIMS], ids=variant_id)
def test_compiles_without_spills(variant):
    """The assembler's report is kept for later runs, under a digest of all that the compiler reads."""
    kept = kept_for_later() / f"{nvrtc._key(variant)}.log"
    if not kept.exists():
        cubin, log = nvrtc.run_nvrtc(variant)
        assert cubin.startswith(b"\x7fELF")
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(log)
        part.rename(kept)
    resources = nvrtc.parse_resources(kept.read_text())
    defines = dict(variant.defines)
    names = ("FFA_HEAD_DIM", "FFA_MAP_LINES", "FFA_MAP_INTERVALS")
    place = (variant.entry, *map(defines.get, names))
    if defines.get("FFA_MAP_TABLE") == "true":
        place = (*place[:3], "table")
    assert resources.spilled_bytes <= SPILLED_BYTES.get(place, 0)
    assert not resources.is_wgmma_serialized


def test_cache(tmp_path, monkeypatch):
    first = nvrtc.compile_variant(VARIANTS[0])
    (cached,) = tmp_path.iterdir()
    assert cached.read_bytes().startswith(first)
    monkeypatch.setattr(nvrtc, "run_nvrtc", lambda variant: pytest.fail("not read from the cache"))
    assert nvrtc.compile_variant(VARIANTS[0]) == first


def test_a_warm_up_has_the_launcher(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr(warm_up, "variants", lambda *_: VARIANTS[:2])
    monkeypatch.setattr(warm_up, "compile_variant", lambda variant: b"")
    monkeypatch.delenv("MAGI_COMPILE_LAUNCHER", raising=False)
    launcher_build._begun.cache_clear()
    assert warm_up.main([]) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
    assert "2 kernels with the launcher, " in capsys.readouterr().out
    launcher_build._begun.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    caplog.set_level("INFO")
    assert warm_up.main([]) == 0
    assert "no launcher: " in caplog.text
    assert "2 kernels without the launcher" in capsys.readouterr().out
    launcher_build._begun.cache_clear()


def test_a_warm_up_that_fails(monkeypatch, capsys):
    def refuse(variant):
        raise nvrtc.CompileError(f"{variant.entry} does not compile")

    monkeypatch.setattr(warm_up, "variants", lambda *_: VARIANTS[:2])
    monkeypatch.setattr(warm_up, "compile_variant", refuse)
    monkeypatch.setenv("MAGI_COMPILE_LAUNCHER", "0")
    assert warm_up.main([]) == 1
    assert "does not compile" in capsys.readouterr().err


def test_a_warm_up_of_some():
    some = list(warm_up.variants((128,), (torch.bfloat16,), ()))
    assert len(some) == len(set(some)) == 16
    assert set(some) < set(VARIANTS)
    common = warm_up.variants(warm_up.COMMON_HEAD_DIMS, (torch.bfloat16,), ())
    assert len(list(common)) == 32
    assert len(VARIANTS) == len(set(VARIANTS)) == 324


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_cache_that_root_made_serves_other_users(monkeypatch):
    """As the document about the environment has it for images."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        cache = f"{directory}/cache"
        monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", cache)
        small = [x for x in VARIANTS if x.entry == "ffa_backward_postprocess"][:1]
        monkeypatch.setattr(warm_up, "variants", lambda *_: small)
        launcher_build._begun.cache_clear()
        assert warm_up.main([]) == 0
        launcher_build._begun.cache_clear()
        subprocess.run(["chmod", "-R", "a+rX,go-w", cache], check=True)
        monkeypatch.setattr(nvrtc, "run_nvrtc", lambda variant: pytest.fail("compiled again"))
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            found = nvrtc.compile_variant(small[0]).startswith(b"\x7fELF")
            os._exit(0 if found and launcher_build.Build().is_done() else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_truncated_file_is_compiled_again(tmp_path, monkeypatch):
    log = "0 bytes spill stores, 0 bytes spill loads\nUsed 100 registers"
    monkeypatch.setattr(nvrtc, "run_nvrtc", lambda variant: (b"cubin", log))
    nvrtc.compile_variant(VARIANTS[0])
    (cached,) = tmp_path.iterdir()
    whole = cached.read_bytes()
    cached.write_bytes(whole[:-2])
    assert nvrtc.compile_variant(VARIANTS[0]) == b"cubin"
    assert cached.read_bytes() == whole


def test_what_sources_that_changed_gave_is_not_kept(tmp_path, monkeypatch):
    """Its name would be that of the sources as they were."""
    log = "0 bytes spill stores, 0 bytes spill loads\nUsed 100 registers"
    monkeypatch.setattr(nvrtc, "run_nvrtc", lambda variant: (b"cubin", log))
    monkeypatch.setattr(nvrtc, "_digest_now", lambda: "others")
    nvrtc._digest_of_sources()
    monkeypatch.setattr(nvrtc, "_digest_now", lambda: "changed")
    assert nvrtc.compile_variant(VARIANTS[0]) == b"cubin"
    assert not list(tmp_path.iterdir())
    nvrtc._digest_of_sources.cache_clear()
    assert nvrtc.compile_variant(VARIANTS[0]) == b"cubin"
    assert len(list(tmp_path.iterdir())) == 1
    nvrtc._digest_of_sources.cache_clear()


def test_an_error_holds_the_log(tmp_path):
    wrong = replace(VARIANTS[0], defines=(*VARIANTS[0].defines, ("FFA_ELEMENT", "no_such_type")))
    with pytest.raises(nvrtc.CompileError, match="no_such_type"):
        nvrtc.compile_variant(wrong)
    assert not list(tmp_path.iterdir())


def test_a_spill_is_an_error(tmp_path):
    starved = dict(VARIANTS[0].defines) | {"FFA_CONSUMER_REGISTERS": "64"}
    with pytest.raises(nvrtc.CompileError, match="spills"):
        nvrtc.compile_variant(replace(VARIANTS[0], defines=tuple(starved.items())))
    assert not list(tmp_path.iterdir())


def test_a_spill_may_be_allowed(monkeypatch):
    """Of what the user's mask makes, nobody can say how many registers it needs."""
    log = "8 bytes spill stores, 8 bytes spill loads\nUsed 255 registers"
    monkeypatch.setattr(nvrtc, "run_nvrtc", lambda variant: (b"cubin", log))
    assert nvrtc.compile_variant(replace(VARIANTS[0], may_spill=True)) == b"cubin"


def test_serialised_wgmma_is_an_error(monkeypatch):
    _, log = nvrtc.run_nvrtc(VARIANTS[0])
    log += "\nPotential Performance Loss: wgmma.mma_async instructions are serialized"
    monkeypatch.setattr(nvrtc, "run_nvrtc", lambda variant: (b"", log))
    with pytest.raises(nvrtc.CompileError, match="serialised"):
        nvrtc.compile_variant(VARIANTS[0])


def test_a_log_without_a_report_is_an_error():
    with pytest.raises(nvrtc.CompileError, match="no resource report"):
        nvrtc.parse_resources("nothing")


@pytest.mark.parametrize("version", [(12, 6), (12, 8)])
def test_an_old_compiler_is_named(monkeypatch, version):
    old = (nvrtc.nvrtc.nvrtcResult.NVRTC_SUCCESS, *version)
    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcVersion", lambda: old)
    nvrtc._version.cache_clear()
    nvrtc._key.cache_clear()
    found, least = ("{}.{}".format(*x) for x in (version, nvrtc.LEAST_VERSION))
    message = rf"must be of CUDA {least} or later, got {found}; .*nvrtc-cu12>={least}'"
    with pytest.raises(nvrtc.CompileError, match=message):
        nvrtc.compile_variant(VARIANTS[0])
