"""Kernels that a wheel brings along: they are found by what they are made of, damage is said, and nothing is taken that
the driver cannot load."""

import json
import logging

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from cuda.bindings import driver

from magi_compile import _warnings, warm_up
from magi_compile.kernels.sm90.masks.mask_slices import mask_variant
from magi_compile.kernels.sm90.masks.source import mask_source
from magi_compile.kernels.sm90.runtime import nvrtc, shipped
from magi_compile.kernels.sm90.runtime.nvrtc import CompileError, Variant
from magi_compile.masks.program.read import read_mask_mod

VARIANT = Variant("masks/block_lists.cu", "ffa_block_lists")
CUBIN = b"\x7fELF of the wheel\0Cuda compilation tools, release 13.0, V13.0.88\0"
REPORT = "0 bytes spill stores, 0 bytes spill loads\nUsed 100 registers"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A package with one kernel, an empty cache, and a compiler that makes something else."""
    found = tmp_path / "package" / "cubins"
    shipped.write(found, {nvrtc.shipped_name(VARIANT): CUBIN})
    monkeypatch.setattr(shipped, "folder", lambda: found)
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MAGI_COMPILE_CUBINS", raising=False)
    monkeypatch.setattr(nvrtc, "run_nvrtc", lambda variant: (b"compiled", REPORT))
    monkeypatch.setattr(_warnings, "_said", set())
    shipped._usable.cache_clear()
    yield found
    shipped._usable.cache_clear()


def driver_for(monkeypatch, version):
    def found():
        if version is None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        return driver.CUresult.CUDA_SUCCESS, version

    monkeypatch.setattr(driver, "cuDriverGetVersion", found)


def test_the_package_comes_first_and_needs_no_compiler(folder, tmp_path, monkeypatch):
    def missing():
        raise RuntimeError("libnvrtc.so is nowhere")

    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcVersion", missing)
    nvrtc._version.cache_clear()
    nvrtc._key.cache_clear()
    assert nvrtc.compile_variant(VARIANT) == CUBIN
    assert not (tmp_path / "cache").exists()
    (folder / shipped.MANIFEST).unlink()
    shipped._usable.cache_clear()
    with pytest.raises(CompileError, match=r"got none \(libnvrtc.so is nowhere\); .*pip install"):
        nvrtc.compile_variant(VARIANT)
    nvrtc._version.cache_clear()


def test_what_the_package_lacks_is_compiled_and_kept(caplog):
    other = Variant("masks/block_lists.cu", "ffa_block_lists", (("A", "1"),))
    for _ in range(2):
        assert nvrtc.compile_variant(other) == b"compiled"
    assert caplog.text == ""


def test_other_sources_have_other_names(monkeypatch):
    name = nvrtc.shipped_name(VARIANT)
    nvrtc._digest.cache_clear()
    monkeypatch.setattr(nvrtc, "_digest_of_sources", lambda: "edited")
    assert nvrtc.shipped_name(VARIANT) != name
    nvrtc._digest.cache_clear()


@pytest.mark.parametrize("version", [(12, 9), (13, 0), (13, 5)])
def test_the_compiler_here_has_no_part_in_a_name(monkeypatch, version):
    found = (nvrtc.nvrtc.nvrtcResult.NVRTC_SUCCESS, *version)
    monkeypatch.setattr(nvrtc.nvrtc, "nvrtcVersion", lambda: found)
    for made in (nvrtc._version, nvrtc._key, nvrtc._digest):
        made.cache_clear()
    assert nvrtc.compile_variant(VARIANT) == CUBIN
    assert "{}.{}".format(*version) in nvrtc._key(VARIANT)
    nvrtc._version.cache_clear()
    nvrtc._key.cache_clear()


def test_a_source_checkout_has_none(folder, caplog):
    (folder / shipped.MANIFEST).unlink()
    assert nvrtc.compile_variant(VARIANT) == b"compiled"
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda cubin, _: cubin.write_bytes(CUBIN[:-1]), "has the SHA-256 "),
        (lambda cubin, _: cubin.write_bytes(CUBIN.replace(b"E", b"F")), "has the SHA-256 "),
        (lambda cubin, _: cubin.unlink(), "No such file"),
        (lambda _, manifest: manifest.write_text("{"), "made_by.json cannot be read"),
        (lambda _, manifest: manifest.write_text("[]"), "made_by.json cannot be read"),
        (lambda _, manifest: manifest.write_text('{"compiler": "13.0"}'), "KeyError"),
        (lambda _, manifest: manifest.write_text('{"compiler": 13, "sha256": {}}'), "Error"),
    ],
)
def test_damage_is_said(folder, caplog, damage, said):
    damage(folder / nvrtc.shipped_name(VARIANT), folder / shipped.MANIFEST)
    assert nvrtc.compile_variant(VARIANT) == b"compiled"
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert said in record.message
    assert f"in {folder}, " in record.message
    assert "install the package anew" in record.message


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [(12080, False), (13000, True), (13050, True), (14000, True), (None, True)],
)
def test_the_driver_must_know_the_compiler(monkeypatch, caplog, version, is_taken):
    """A machine without a driver loads nothing: it makes an image."""
    caplog.set_level(logging.INFO)
    driver_for(monkeypatch, version)
    assert nvrtc.compile_variant(VARIANT) == (CUBIN if is_taken else b"compiled")
    assert ("need a driver for CUDA 13, got one for CUDA 12" in caplog.text) == (not is_taken)


def test_a_variable_switches_them_off(monkeypatch):
    monkeypatch.setenv("MAGI_COMPILE_CUBINS", "0")
    assert nvrtc.compile_variant(VARIANT) == b"compiled"


def test_a_manifest_says_what_made_it(folder, tmp_path):
    manifest = json.loads((folder / shipped.MANIFEST).read_text())
    assert manifest["compiler"] == "13.0.88"
    assert list(manifest["sha256"]) == [nvrtc.shipped_name(VARIANT)]
    with pytest.raises(ValueError, match="must be empty, got "):
        shipped.write(folder, {})
    with pytest.raises(ValueError, match="must name the version of its compiler"):
        shipped.write(tmp_path / "new", {"a.cubin": b"\x7fELF"})


def test_a_failure_writes_nothing(tmp_path, monkeypatch, capsys):
    def refuse(variant):
        raise CompileError(f"{variant.entry} does not compile")

    monkeypatch.setattr(warm_up, "compile_anew", refuse)
    monkeypatch.setattr(warm_up, "variants", lambda *_: [VARIANT])
    assert warm_up.main(["--into", str(tmp_path / "into")]) == 1
    assert "ffa_block_lists does not compile" in capsys.readouterr().err
    assert not (tmp_path / "into").exists()


def causal(b, h, q, kv):
    return q >= kv


def documents_of(document, dims):
    at = (lambda b, x: document[b, x]) if dims == 2 else (lambda b, x: document[x])
    return lambda b, h, q, kv: at(b, q) == at(b, kv)


def masks():
    """As users write them."""
    yield causal
    yield lambda b, h, q, kv: kv <= q
    for dims, length in ((1, 7), (2, 300)):
        shape = (2, length)[2 - dims :]
        document = documents_of(torch.zeros(shape, dtype=torch.int64), dims)
        if dims == 1:
            yield document
        yield lambda *ids, document=document: causal(*ids) & document(*ids)
        yield lambda *ids, document=document: document(*ids) & causal(*ids)


@pytest.mark.parametrize("mask_mod", list(masks()))
def test_causal_and_document_masks_are_among_them(mask_mod):
    program = read_mask_mod(mask_mod).program
    source = mask_source(program, program.keys(1000), (torch.int64,) * program.num_captures)
    assert mask_variant(source) in set(warm_up.variants((), (), ()))


@pytest.mark.slow
def test_a_wheels_kernels(tmp_path, monkeypatch):
    """All that a release has."""
    monkeypatch.undo()
    monkeypatch.setenv("MAGI_COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "folder", lambda: tmp_path / "cubins")
    shipped._usable.cache_clear()
    assert warm_up.main(["--into", str(tmp_path / "cubins")]) == 0
    monkeypatch.setattr(nvrtc, "run_nvrtc", lambda variant: pytest.fail(f"compiled {variant}"))
    common = warm_up.variants(warm_up.COMMON_HEAD_DIMS, (torch.bfloat16,), ())
    found = [nvrtc.compile_variant(x) for x in common]
    assert len(found) == len(set(found)) == len(list((tmp_path / "cubins").glob("*.cubin"))) == 32
    assert all(cubin.startswith(b"\x7fELF") for cubin in found)
    assert not (tmp_path / "cache").exists()
