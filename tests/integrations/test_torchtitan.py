"""Models of torchtitan on our kernels. Training is what `torchtitan_runs` does in processes of its own."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

from magi_compile import AttnSlices, MaskDataError

pytest.importorskip(
    "torchtitan", reason="needs torchtitan, which .ci/run installs in an environment of its own"
)

from torchtitan.distributed import cudagraph
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.context_parallel import api
from torchtitan.models import gpt_oss, llama3
from torchtitan.models.common import attention as theirs
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from magi_compile.integrations import torchtitan as door
from tests.support.launched import launch

ROOT = Path(__file__).parents[2]
FEW = "steps=3"
SINKS = "gpt_oss layers=2 bf16 steps=2"
WEIGHTS = '{"weights":{"basic_mask":1,"sliding_window_mask":1}}'
HEADS = 'llama3 cp=2 options={"head_ranks":2}'
SPREAD = f"gpt_oss cp=2 compile options={WEIGHTS}"
RUNS = [
    "llama3 dense",
    "llama3",
    "llama3 compile",
    "llama3 cp=2",
    "llama3 cp=2 compile",
    f"llama3 {FEW}",
    f"llama3 cp=2 balancer=None {FEW}",
    f"{HEADS} {FEW}",
    f"{HEADS} compile {FEW}",
    f"llama3 dp=2 {FEW}",
    f"llama3 tp=2 {FEW}",
    f"llama3 pp=2 {FEW}",
    SINKS.replace("gpt_oss", "gpt_oss dense"),
    SINKS,
    SINKS.replace("gpt_oss", "gpt_oss_varlen"),
    SINKS.replace("gpt_oss", SPREAD),
    "llama3 cp=2 balancer=ptrr",
]


# As torchtitan has it by default: CUDA graphs, selective checkpointing, bf16.
BY_DEFAULT = "compile bf16 graphs steps=8"
ON_GPUS = [
    "llama3 dense bf16 steps=8",
    f"llama3 {BY_DEFAULT}",
    f"llama3 {BY_DEFAULT} ac=full",
    f"llama3 {BY_DEFAULT} ac=none",
    "llama3 cp=2 compile bf16 steps=8",
    "llama3 cp=2 tp=2 compile bf16 steps=8",
    "llama3 cp=4 compile bf16 steps=8",
    "gpt_oss dense layers=2 bf16 steps=4",
    "gpt_oss layers=2 compile bf16 graphs steps=4",
    "gpt_oss cp=2 layers=2 compile bf16 steps=4",
]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """What happened in each of RUNS."""
    return train_all(RUNS, tmp_path_factory, {"CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture(scope="module")
def records_on_gpus(tmp_path_factory):
    """What happened in those of ON_GPUS for which there are enough; the processes are forked,
    so nothing may start CUDA before."""
    names = [name for name in ON_GPUS if num_gpus_of(name) <= torch.cuda.device_count()]
    return train_all(names, tmp_path_factory, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})


def num_gpus_of(name):
    return math.prod(int(x) for x in re.findall(r"(?:cp|tp)=(\d)", name))


def train_all(names, tmp_path_factory, variables):
    results = tmp_path_factory.mktemp("torchtitan") / "results.json"
    command = [sys.executable, "-m", "tests.integrations.torchtitan_runs", str(results), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(results.parent / "inductor")
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2400
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(results.read_text())


def losses(records, name):
    assert not records[name]["error"], f"{name}: {records[name]['error']}"
    return records[name]["losses"]


LONG = ["llama3", "llama3 compile", "llama3 cp=2", "llama3 cp=2 compile"]


@pytest.mark.slow
class TestTraining:
    @pytest.mark.parametrize("name", LONG)
    def test_twenty_steps(self, records, name):
        """Losses are those of dense attention by torchtitan's own mask, on one rank."""
        ours, right = losses(records, name), losses(records, "llama3 dense")
        assert len(ours) == 20
        assert ours == pytest.approx(right, abs=1e-4)
        assert right[-1] < right[0] - 0.5

    @pytest.mark.parametrize("name", LONG)
    def test_attention_runs_once_in_each_layer_and_step(self, records, name):
        """Under selective checkpointing, torchtitan's default."""
        record = records[name]
        assert (record["forwards"], record["backwards"]) == (6 * 20, 6 * 20)

    @pytest.mark.parametrize("name", LONG)
    def test_batches_are_planned_on_the_host(self, records, name):
        """While the GPU runs the step before; a plan behind the way of a batch to the GPU would hold up its step."""
        assert records[name]["planned"] == (20 if "cp=2" in name else 0)

    @pytest.mark.parametrize("name", [name for name in LONG if "compile" in name])
    def test_nothing_breaks_or_compiles_again(self, records, name):
        record = records[name]
        assert record["breaks"] == 0
        assert record["graphs"][0] > 0
        assert set(record["graphs"]) == {record["graphs"][0]}

    @pytest.mark.parametrize("axis", ["cp=2 balancer=None", "dp=2", "tp=2", "pp=2"])
    def test_other_parallelism(self, records, axis):
        ours, right = losses(records, f"llama3 {axis} {FEW}"), losses(records, f"llama3 {FEW}")
        assert ours == pytest.approx(right, abs=1e-4)

    @pytest.mark.parametrize("name", [f"{HEADS} {FEW}", f"{HEADS} compile {FEW}"])
    def test_ranks_that_share_heads(self, records, name):
        right = losses(records, f"llama3 {FEW}")
        assert losses(records, name) == pytest.approx(right, abs=1e-4)

    @pytest.mark.parametrize("model", ["gpt_oss", "gpt_oss_varlen", SPREAD])
    def test_windows_and_sinks(self, records, model):
        """Layers of two kinds, which share one placement of tokens; bf16,
        because torchtitan's experts know nothing else."""
        ours = losses(records, SINKS.replace("gpt_oss", model))
        right = losses(records, SINKS.replace("gpt_oss", "gpt_oss dense"))
        assert ours == pytest.approx(right, abs=2e-2)

    def test_a_balancer_of_torchtitan(self, records):
        error = records["llama3 cp=2 balancer=ptrr"]["error"]
        assert "context_parallel_load_balancer` must be 'headtail'" in error
        assert error.endswith("got 'ptrr'")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in ON_GPUS if "dense" not in name])
def test_on_gpus(records_on_gpus, name):
    """The losses of dense attention; nothing breaks a graph or compiles again after the step that records."""
    if name not in records_on_gpus:
        pytest.skip(f"needs {num_gpus_of(name)} GPUs, found {torch.cuda.device_count()}")
    (dense,) = (x for x in ON_GPUS if x.startswith(f"{name.split()[0]} dense"))
    right = losses(records_on_gpus, dense)
    assert losses(records_on_gpus, name) == pytest.approx(right, abs=3e-2)
    record = records_on_gpus[name]
    assert record["breaks"] == 0
    assert len(set(record["graphs"][2:])) == 1


def run_example(words, world=1, **environment):
    """The losses that the example prints, by step, and all that it prints."""
    run = launch(world, ROOT / "examples" / "torchtitan_packed.py", *words, **environment)
    assert run.returncode == 0, run.stderr[-4000:]
    log = run.stdout + run.stderr
    printed = re.findall(r"step: +(\d+).*?loss: +([\d.]+)", log)
    return {int(step): float(loss) for step, loss in printed}, log


@pytest.mark.slow
def test_example():
    """The command line of torchtitan: the stock recipe, the override with an option, two ranks."""
    override = 'magi_compile.integrations.torchtitan.magi={"chunk_size": 64}'
    words = ["--config", "recipe", "--override.imports", override, "--training.steps", "3"]
    words += ["--parallelism.context_parallel_degree", "2"]
    printed, log = run_example(words, 2, CUDA_VISIBLE_DEVICES="")
    assert "FlexAttention.Config -> MagiAttention.Config with chunk_size=64" in log
    assert list(printed) == [1, 2, 3]
    assert all(7 < loss < 9 for loss in printed.values())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_cuda_graphs(compiled):
    """What torchtitan records in the second step serves the documents of all others."""
    words = ["--training.steps", "8", *(["--compile.enable"] if compiled else [])]
    without, _ = run_example(words)
    recorded, log = run_example([*words, "--training.no-disable-cuda-graphs"])
    assert "Recorded CUDA graph" in log
    assert recorded == pytest.approx(without, abs=2e-2)


# Masks


def starts_at(*starts, length=60):
    """Positions `[1, length]` of documents that begin there."""
    lengths = torch.tensor([*starts, length]).diff().tolist()
    return torch.cat([torch.arange(n) for n in lengths])[None]


def spec_of(registry=llama3, backend="flex"):
    return registry.model_registry("debugmodel", attn_backend=backend)


def config_of(**options):
    """The attention of a layer, replaced."""
    configs = spec_of().model.traverse(FlexAttention.Config)
    return door.magi(next(config for _, config, *_ in configs), **options)


def make_mask(mask_mod, batch=1, **options):
    return door.make_mask(mask_mod, batch, 60, torch.device("cpu"), config_of(**options))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("batch", [1, 2])
def test_mask_is_that_of_torchtitan(batch, window):
    positions = torch.cat([starts_at(0, 1, 30), starts_at(0, 17, 31, 59)][:batch])
    of_documents = theirs.get_efficient_causal_mask_mod_for_packed_document(positions)
    mask_mod = and_masks(theirs.get_causal_mask_mod(), of_documents)
    if window:
        mask_mod = and_masks(mask_mod, theirs.get_sliding_window_mask_mod(window))
    slices = AttnSlices(*make_mask(mask_mod, batch), batch * 60, batch * 60)
    b, place = torch.arange(batch).view(-1, 1, 1), torch.arange(60)
    right = mask_mod(b, torch.tensor(0), place.view(-1, 1), place).expand(batch, 60, 60)
    assert torch.equal(slices.to_dense(), torch.block_diag(*right.int()).bool())


def test_masks_of_other_documents_fit_the_same_cuda_graph():
    """Only tensors, of shapes that do not depend on the documents."""
    some, others = (
        make_mask(theirs.get_document_mask_mod(starts_at(*starts)))
        for starts in ((0,), (0, 5, 11, 40))
    )
    spec = cudagraph.CUDAGraphInputSpec({"attention_masks": some})
    leaves, other_leaves = (spec.flatten({"attention_masks": x}) for x in (some, others))
    assert len(leaves) == 3
    for x, y in zip(leaves, other_leaves, strict=True):
        assert (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


def test_room_for_slices():
    mask_mod = theirs.get_document_mask_mod(starts_at(*range(0, 60, 2)))
    with pytest.raises(MaskDataError, match=r"must fit in 4 slices \(`slice_capacity`\).* 30"):
        make_mask(mask_mod, slice_capacity=4)


# Doors


def recipe(spec):
    return Trainer.Config(model_spec=spec)


def test_use_magi_names_the_overrides_of_a_model():
    name = "magi_compile.integrations.torchtitan"
    assert door.use_magi(recipe(spec_of())).override.imports == [f"{name}.magi"]
    varlen = door.use_magi(recipe(spec_of(gpt_oss, "varlen")), chunk_size=64)
    assert varlen.override.imports == [(f"{name}.magi_varlen", {"chunk_size": 64})]


def test_attention_of_others_stays_as_it_is():
    config_of()  # replaces what is replaced
    layer = SimpleNamespace(inner_attention=FlexAttention.Config())
    mods = [theirs.get_causal_mask_mod()]
    mask = Decoder._create_flex_attention_mask(None, starts_at(0), layer, mods)
    assert isinstance(mask, BlockMask)
    shard = door._with_our_plans(lambda *args, **kwargs: (args, kwargs))
    given = ("mesh", (), None, "ptrr"), {"ptrr_mask_key": "all"}
    assert shard(*given[0], **given[1]) == given


def test_checkpointing_saves_attention():
    config_of()
    saved = SelectiveAC(SelectiveAC.Config()).get_save_ops()
    magi = torch.ops.magi
    ops = (magi.ffa_fwd, magi.cp_ffa_fwd, magi.plan, magi.cp_exchange_heads)
    assert {op.default for op in ops} <= saved
    assert torch.ops.aten.mm.default in saved


# What is refused


def test_unknown_options():
    with pytest.raises(
        TypeError, match=r"no other options than chunk_size, head_ranks, .*got chunks=4"
    ):
        door.use_magi(recipe(spec_of()), chunks=4)


def test_a_model_without_attention_of_ours():
    spec = spec_of()
    spec.model.layers.clear()
    with pytest.raises(ValueError, match=r"layers have FlexAttention or .*got llama3 debugmodel"):
        door.use_magi(recipe(spec))
    with pytest.raises(ValueError, match=r"layers have FlexAttention or .*got None"):
        door.use_magi(recipe(None))


def attend(**arguments):
    qkv = (torch.randn(1, 60, 2, 16) for _ in range(3))
    return config_of().build()(*qkv, **arguments)


def test_what_changes_scores():
    mask = make_mask(theirs.get_causal_mask_mod())
    with pytest.raises(NotImplementedError, match=r"magi has no `score_mod`; leave this model"):
        attend(attention_masks=mask, score_mod=lambda score, *_: score)
    attend(attention_masks=mask, score_mod=None)


def test_masks_that_a_model_makes_by_itself():
    mask = create_block_mask(theirs.get_causal_mask_mod(), 1, None, 60, 60, "cpu")
    with pytest.raises(NotImplementedError, match=r"_create_flex_attention_mask .*type BlockMask"):
        attend(attention_masks=mask)


def model_with(attention):
    layers = [SimpleNamespace(attention=attention)]
    return SimpleNamespace(config=SimpleNamespace(layers=layers))


def make_mask_for(model):
    layer = SimpleNamespace(inner_attention=config_of())
    mods = [theirs.get_causal_mask_mod()]
    return Decoder._create_flex_attention_mask(model, starts_at(0), layer, mods)


def test_layers_of_another_kind():
    with pytest.raises(
        NotImplementedError, match=r"all have attention, got .* layer 0 has another"
    ):
        make_mask_for(model_with(None))


def test_a_window_that_masks_do_not_have():
    config = door.magi_varlen(VarlenAttention.Config(window_size=(6, 0)))
    with_window = {"inner_attention": config, "sliding_window_size": 7}
    make_mask_for(model_with(SimpleNamespace(**with_window)))
    with pytest.raises(NotImplementedError, match=r"layer 0 must be .*, \(-1, 0\), got \(6, 0\)"):
        make_mask_for(model_with(SimpleNamespace(inner_attention=config)))


def test_cuda_graphs_with_context_parallelism(monkeypatch):
    monkeypatch.setattr(cudagraph._manager, "_wrappers", ["of a step"])
    mask, inputs = make_mask(theirs.get_causal_mask_mod()), (torch.zeros(1, 60),) * 3
    with pytest.raises(ValueError, match=r"disable_cuda_graphs` .*, got False"):
        api.cp_shard(None, inputs, mask)


# Batches that are planned ahead


class WithOtherPositions(Trainer):
    def batch_generator(self, data_iterable):
        for batch, labels in super().batch_generator(data_iterable):
            batch["positions"] = starts_at(0, 9)
            yield batch, labels


class WithAnotherStep(Trainer):
    def train_step(self, data_iterator):
        batch, _ = next(data_iterator)
        batch["positions"] = starts_at(0, 9)


def trainer_of(kind):
    """As much of a trainer as planning asks for."""
    trainer = object.__new__(kind)
    model = SimpleNamespace(
        get_attention_masks=lambda positions: make_mask(theirs.get_document_mask_mod(positions))
    )
    trainer.parallel_dims = SimpleNamespace(cp_enabled=True, get_mesh=lambda name: name)
    trainer.model_config = SimpleNamespace(
        first_attention=SimpleNamespace(inner_attention=config_of())
    )
    trainer.model_parts = [model]
    trainer.config = SimpleNamespace(
        parallelism=SimpleNamespace(context_parallel_load_balancer="headtail")
    )
    return trainer


def planned_ahead(monkeypatch, kind=Trainer, change=None):
    """The plans that a step finds for its batch, or None."""

    def plans_of(mesh, masks, balancer):
        return {name: "a plan" for name in masks}

    monkeypatch.setattr(door, "_plans_of", plans_of)
    monkeypatch.setattr(
        Trainer, "batch_generator", door._with_plans_of_batches(lambda self, data: iter(data))
    )
    step = door._with_its_plan(lambda self, batch: door._this_batch.get())
    trainer = trainer_of(kind)
    batches = [({"input": None, "positions": starts_at(0, 5, 11)}, None)]
    for batch, _ in trainer.batch_generator(batches):
        if change is not None:
            change(batch, trainer)
        assert step(trainer_of(kind), batch) is None  # another trainer
        found = step(trainer, batch)
        assert step(trainer, batch) is None  # once
    return found


def replace_positions(batch, trainer):
    batch["positions"] = starts_at(0, 9)


def test_a_batch_is_planned_ahead(monkeypatch):
    assert planned_ahead(monkeypatch) == {"mask": "a plan"}

    for way in (lambda x: x.to("meta"), lambda x: x.to("cpu:0"), torch.clone):

        def take(batch, trainer, way=way):
            batch["positions"] = way(batch["positions"])

        assert planned_ahead(monkeypatch, change=take) == {"mask": "a plan"}


@pytest.mark.parametrize(
    "change",
    [
        replace_positions,
        lambda batch, trainer: batch["positions"].zero_(),
        lambda batch, trainer: batch.pop("positions"),
    ],
    ids=["others", "in place", "none"],
)
def test_positions_that_change_before_the_step(monkeypatch, change):
    assert planned_ahead(monkeypatch, change=change) is None


@pytest.mark.parametrize("kind", [WithOtherPositions, WithAnotherStep])
def test_a_trainer_that_may_change_positions(monkeypatch, kind):
    """They are on the GPU when a step sees them, where nobody could compare them without waiting for it."""
    assert planned_ahead(monkeypatch, kind) is None


def test_a_model_that_takes_positions_on_its_device_alone():
    trainer = trainer_of(Trainer)
    on_device = torch.zeros(1, 60, dtype=torch.int64, device="meta")

    def get_attention_masks(positions):
        if positions.device != on_device.device:
            raise RuntimeError("Expected all tensors to be on the same device")
        return on_device

    trainer.model_parts[0].get_attention_masks = get_attention_masks
    assert door._plans_of_batch(trainer, {"positions": starts_at(0)}) is None


def test_a_trainer_with_a_step_of_its_own(monkeypatch):
    trainer = trainer_of(Trainer)
    trainer.train_step = lambda data_iterator: None
    assert door._plans_of_batch(trainer, {"positions": starts_at(0)}) is None
