"""Trainer, SFTTrainer and accelerate's plain loop over ranks: every logged number is that of one process."""

import datetime
import pickle
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers as hf
from torch.utils.data import DataLoader

from magi_compile import create_block_mask
from magi_compile.dtensor import ContextParallelOptions
from magi_compile.integrations import sharded_batches, trainer
from magi_compile.integrations.packed_documents import starts_of_documents
from magi_compile.integrations.sharded_batches import COUNT, BatchPlanner, Exact, LayerSlices
from magi_compile.integrations.trainer import ContextParallelMixin, context_parallel
from magi_compile.integrations.transformers import masks_of_layers
from magi_compile.masks.block_mask import slices_from_block_mask
from tests.dtensor.support.ranks import Ranks
from tests.integrations import trainer_runs
from tests.integrations.trainer_runs import (
    SMALL,
    config_of,
    documents,
    model_of,
    run,
)

REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
KEPT = {"use_reentrant": False, "context_fn": trainer_runs.keeps_attention}
EVALUATED = {"pad": True, "metrics": True, "eval_strategy": "steps", "eval_steps": 2}
# The door, its arguments, and by how much a loss may be off.
CASES = {
    "llama, accumulated, reentrant checkpoints": (
        "trainer",
        {"name": "llama", "gradient_accumulation_steps": 2, **REENTRANT},
    ),
    "gemma3, mixin, checkpoints, planned in a worker": (
        "trainer",
        {
            "name": "gemma3",
            "mixin": True,
            "gradient_checkpointing": True,
            "dataloader_num_workers": 1,
        },
    ),
    "gpt_oss, default options": (
        "trainer",
        {"name": "gpt_oss", "options": ContextParallelOptions()},
    ),
    "gemma3, shared heads": (
        "trainer",
        {"name": "gemma3", "options": ContextParallelOptions(chunk_size=8, head_ranks=2)},
    ),
    "gemma2": ("trainer", {"name": "gemma2"}),
    "llama4": ("trainer", {"name": "llama4"}),
    "llama, stream, tokens counted": (
        "trainer",
        {"name": "llama", "stream": True, "include_num_input_tokens_seen": "all"},
    ),
    "llama, padded rows, evaluation, predictions": ("trainer", {"name": "llama", **EVALUATED}),
    "llama, checkpoints that keep attention": (
        "trainer",
        {
            "name": "llama",
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": KEPT,
        },
    ),
    "llama, saved and resumed": ("trainer", {"name": "llama", "resume": True}),
    "gemma3, ParallelismConfig": ("trainer", {"name": "gemma3", "in_config": True}),
    "gemma3, LoRA": ("trainer", {"name": "gemma3", "lora": True}),
    "phi3, longrope, checkpoints": ("trainer", {"name": "phi3", "gradient_checkpointing": True}),
    "llama, dynamic rope, padded rows": ("trainer", {"name": "dynamic", "pad": True}),
    "loop, DDP, llama": ("loop", {"name": "llama"}),
    "loop, DDP, gpt_oss": ("loop", {"name": "gpt_oss"}),
    "loop, FSDP2, gemma3": ("loop", {"name": "gemma3", "shards_weights": True}),
    "SFTTrainer, packing, llama": ("sft", {"name": "llama", "packing": True}),
    "SFTTrainer, packing, gpt_oss": ("sft", {"name": "gpt_oss", "packing": True}),
    "SFTTrainer, padding_free, gemma3": ("sft", {"name": "gemma3", "packing": False}),
}
SLOW = {"llama, torch_compile": ("trainer", {"name": "llama", "compiled": True})}


# Before, chunks were counted over the whole pack.
COUNTS_CHUNKS = tuple(map(int, hf.__version__.split(".")[:2])) >= (5, 23)


def is_here(name):
    if name == "llama4":
        return COUNTS_CHUNKS
    needs = {"SFTTrainer": ("trl", "datasets"), "LoRA": ("peft",)}
    found = [module for word, modules in needs.items() if word in name for module in modules]
    return all(find_spec(module) for module in found)


class Runs:
    """The numbers of all cases on ranks, made in one launch."""

    def __init__(self, size, cases):
        self.cases = {name: case for name, case in cases.items() if is_here(name)}
        self.ranks = Ranks(size, timeout=datetime.timedelta(seconds=240))
        self._found = None

    def of(self, name):
        if name not in self.cases:
            pytest.skip(f"{name!r} needs a framework, or a version of one, that is not here")
        if self._found is None:
            results = self.ranks.run(run, list(self.cases.values()))
            self._found = dict(zip(self.cases, results[0], strict=True))
        return self._found[name]


@pytest.fixture(scope="module")
def two():
    made = Runs(2, CASES)
    yield made
    made.ranks.close()


@pytest.fixture(scope="module")
def four():
    made = Runs(4, CASES)
    yield made
    made.ranks.close()


def check(ours, alone, but=()):
    """Every number that was logged, step by step, the predictions and the weights."""
    assert [list(x) for x in ours] == [list(x) for x in alone]
    assert len(alone) >= 3
    for step, wanted in zip(ours, alone, strict=True):
        for name, y in wanted.items():
            if name in but:
                continue
            x, y = np.asarray(step[name]), np.asarray(y)
            if name == "predicted":
                is_token = np.abs(x).sum(-1) > 0  # ranks do not compute padding
                is_token &= x[..., 0] != -100
                assert is_token.sum() > 100
                x, y = x[is_token], y[is_token]
            np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_one_process(name, two):
    check(two.of(name), run(None, [two.cases[name]])[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_groups_of_two(name, two, four):
    """Beside data parallelism of two processes."""
    check(four.of(name), two.ranks.run(run, [four.cases[name]], 1)[0][0])


SPLIT = {
    "loop, split by PyTorch": ("loop", {"name": "llama", "shards_weights": True, "tp": 2}),
    "Trainer, split by transformers": ("trainer", {"name": "llama", "tp": 2, **EVALUATED}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_tensor_parallelism(name, four):
    """Two ranks of each document, and heads on two."""
    check(four.ranks.run(run, [SPLIT[name]])[0][0], run(None, [SPLIT[name]])[0])


@pytest.mark.slow
def test_compiled(two):
    (case,) = SLOW.values()
    check(two.ranks.run(run, [case])[0][0], run(None, [case])[0])


# What would be wrong is refused


def trainer_of(model=None, **more):
    arguments = trainer_runs.arguments_of(1, **more.pop("args", {}))
    args = hf.TrainingArguments(trainer_runs.tempfile.mkdtemp(), **arguments)
    given = {"data_collator": hf.DataCollatorWithFlattening(), "train_dataset": documents(8, 1)}
    return hf.Trainer(model=model or model_of("llama"), args=args, **given, **more)


class WithoutArguments(hf.LlamaForCausalLM):
    def forward(self, input_ids, labels=None):
        return super().forward(input_ids, labels=labels)


REFUSED = {
    "label_smoothing": (
        {"args": {"label_smoothing_factor": 0.1}},
        "`label_smoothing_factor` makes",
    ),
    "loss": ({"compute_loss_func": lambda *_, **__: 0}, "`compute_loss_func` makes"),
    "rebalance": (
        {"args": {"train_sampling_strategy": "batch_rebalance", "train_batch_size": 8}},
        "gives every rank batches of its own",
    ),
    "average": (
        {"args": {"average_tokens_across_devices": False}},
        "`average_tokens_across_devices` must be True",
    ),
    "gather": ({"args": {"eval_use_gather_object": True}}, "gathers from every rank"),
    "dispatch": (
        {"args": {"accelerator_config": {"dispatch_batches": True}}},
        "`dispatch_batches` must be False",
    ),
    "arguments": (
        {"model": lambda: WithoutArguments(config_of("llama"))},
        r"must take `num_items_in_batch`",
    ),
    "encoder": (
        {"model": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL))},
        "must be a causal language model",
    ),
    "state": (
        {"model": lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=97, hidden_size=32))},
        "keep a state along the sequence",
    ),
    "init": ({}, "makes a new model in `train`"),
    "noise": ({"args": {"neftune_noise_alpha": 5.0}}, "`neftune_noise_alpha` scales its noise"),
    "processes": ({}, "needs processes, as torchrun starts them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    given, message = REFUSED[name]
    given = dict(given)
    if "model" in given:
        given["model"] = given["model"]()
    if name == "rebalance":
        trainer = trainer_of()
        trainer.args.train_sampling_strategy = "batch_rebalance"
    else:
        trainer = trainer_of(**given)
    if name == "init":
        trainer.model_init = lambda: model_of("llama")
    with pytest.raises((ValueError, NotImplementedError), match=message):
        context_parallel(trainer, cp_size=2)


@pytest.mark.parametrize(("given", "wanted"), [(1022, 1022), (77, 77)])
def test_a_count_that_was_cast_is_exact_again(given, wanted):
    """1022 is 1024 in bfloat16, as FSDP2 hands it on; a count of the user's own (77) stays."""
    model, exact = SimpleNamespace(base_model=SimpleNamespace()), torch.tensor(1022.0)
    kwargs = {"num_items_in_batch": torch.tensor(given).bfloat16(), COUNT: Exact(exact)}
    _, kwargs = trainer._expect_masks(model, (), kwargs)
    assert list(kwargs) == ["num_items_in_batch"]
    assert float(kwargs["num_items_in_batch"]) == wanted


def test_other_losses_of_trl_are_refused():
    made = {"__module__": "trl.trainer.dpo_trainer", "compute_loss": hf.Trainer.compute_loss}
    trainer = trainer_of()
    trainer.__class__ = type("DPOTrainer", (hf.Trainer,), made)
    with pytest.raises(NotImplementedError, match="DPOTrainer of TRL makes its loss of the logits"):
        context_parallel(trainer, cp_size=2)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="must be a Trainer or an Accelerator, got int"):
        context_parallel(3, cp_size=2)
    with pytest.raises(ValueError, match="`model` must be None for a Trainer"):
        context_parallel(trainer_of(), model_of("llama"), cp_size=2)
    with pytest.raises(ValueError, match="`cp_size` must be given"):
        context_parallel(trainer_of())


def refused_on_ranks(group):
    run(group, [])
    from accelerate import Accelerator

    with pytest.raises(ValueError, match="`cp_size` must divide the 2 processes, got 3"):
        context_parallel(trainer_of(), cp_size=3)
    split = Accelerator(cpu=True, parallelism_config=trainer_runs.parallelism_config(1, 2))
    message = "`cp_size` must divide the 2 processes, 2 of which split one model, got 2"
    with pytest.raises(ValueError, match=message):
        context_parallel(split, model_of("llama"), cp_size=2)
    config = trainer_runs.parallelism_config(2)
    config.dp_shard_size = 2  # as Trainer sets it for a model that transformers has split
    sharded = Accelerator(cpu=True, parallelism_config=config)
    message = "must multiply to the 2 processes, got 4; .* leave out `cp_size` of ParallelismConfig"
    with pytest.raises(ValueError, match=message):
        context_parallel(sharded, model_of("llama"))
    trainer_runs.AcceleratorState._reset_state(True)
    trainer = context_parallel(trainer_of(), cp_size=2)
    assert isinstance(trainer, hf.Trainer)
    with pytest.raises(ValueError, match="must not be context parallel already"):
        context_parallel(trainer, cp_size=2)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(DataLoader(documents(8, 1)))
    with pytest.raises(ValueError, match="must have prepared nothing yet"):
        context_parallel(accelerator, model_of("llama"), cp_size=2)


class Shifts(hf.LlamaForCausalLM):
    """Shifts labels itself, and does not read `shift_labels`."""

    def forward(self, input_ids, labels=None, shift_labels=None, num_items_in_batch=None, **rest):
        out = super().forward(input_ids, **rest)
        out["loss"] = self.loss_function(
            out.logits, labels, 97, num_items_in_batch=num_items_in_batch
        )
        return out


class LosesMasks(hf.LlamaForCausalLM):
    """Does not hand its arguments on to the decoder."""

    def forward(self, input_ids, position_ids=None, labels=None, **rest):
        return super().forward(input_ids, position_ids=position_ids, labels=labels)


class ClassicLoss(hf.Trainer):
    """A mean over `labels`, as many programs have it, which ignores all of them here: nan."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )


class SeesShards(ContextParallelMixin, hf.Trainer):
    """Overrides behind the mixin, and in front of it."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.seen = inputs["input_ids"].shape, "shift_labels" in inputs
        return super().compute_loss(model, inputs, *args, **kwargs)


def own_losses(group):
    run(group, [])
    given = {"model": model_of("llama"), "args": trainer_of().args}
    given |= {"train_dataset": documents(8, 1), "data_collator": hf.DataCollatorWithFlattening()}
    trainer = context_parallel(ClassicLoss(**given), cp_size=2)
    with pytest.raises(RuntimeError, match="first loss is nan: it must count `shift_labels`"):
        trainer.train()
    trainer = SeesShards(**given, cp_size=2)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, batch)
    (_, rows), has_labels = trainer.seen
    assert has_labels
    assert rows < batch["input_ids"].shape[1]


def loops(group):
    """Batches cut before the first forward, schedulers, a loader that serves elsewhere too, models that are saved, two
    models on one accelerator, and an accelerator whose model was refused."""
    run(group, [])
    import copy
    import io

    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), model_of("llama")
    with pytest.raises(NotImplementedError, match="must take `num_items_in_batch`"):
        context_parallel(accelerator, WithoutArguments(config_of("llama")), cp_size=2)
    assert accelerator.dataloader_config.dispatch_batches is None
    ranks = context_parallel(accelerator, model, cp_size=2)
    other = context_parallel(accelerator, model_of("gemma3"), cp_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    loader = DataLoader(documents(8, 1), 2, collate_fn=hf.DataCollatorWithFlattening())
    own = loader.collate_fn
    model, optimizer, prepared, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert loader.collate_fn is own
    batches = list(prepared)
    keys = {ranks.sharded(x).planned.key for x in batches}
    assert keys == {ranks.planner.key} != {other.planner.key}
    assert {other.sharded(x).planned.key for x in batches} == {other.planner.key}
    losses = [model(**ranks.shard(x)).loss for x in batches]
    accelerator.backward(losses[0])
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]  # one step for one batch of the group
    torch.save(accelerator.unwrap_model(model), io.BytesIO())
    copy.deepcopy(accelerator.unwrap_model(model))


def wrong_models(group):
    run(group, [])
    for kind, message in (
        (Shifts, "it must count `shift_labels`"),
        (LosesMasks, "has not got the masks"),
    ):
        trainer = context_parallel(trainer_of(kind(config_of("llama"))), cp_size=2)
        with pytest.raises(RuntimeError, match=message):
            trainer.train()


def other_tokens(group):
    """Ranks whose tokens differ, and whose documents do not."""
    run(group, [])
    from accelerate import Accelerator

    model = model_of("llama")
    ranks = context_parallel(Accelerator(cpu=True), model, cp_size=2)
    tokens = torch.arange(40)[None] + group.rank()
    with pytest.raises(ValueError, match="must have the same tokens"):
        ranks.shard({"input_ids": tokens, "labels": tokens})


def changed_behind_the_loader(group):
    """Batches that are shortened as all ranks do it are planned again; others are an error on all ranks, at once."""
    run(group, [])
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), model_of("llama")
    ranks = context_parallel(accelerator, model, cp_size=2)
    collate = hf.DataCollatorWithFlattening()
    loader = accelerator.prepare(DataLoader(documents(4, 1), 4, collate_fn=collate))
    (batch,) = loader
    short = {name: x[:, :30] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    assert ranks.sharded(batch).planned is batch[sharded_batches.PLAN]
    assert ranks.sharded(short).planned.shape == (1, 30)
    given = {name: x for name, x in short.items() if name != sharded_batches.PLAN}
    alone = model_of("llama")(**given, use_cache=False).loss
    loss = model(**ranks.shard(short)).loss.detach()
    torch.distributed.all_reduce(loss, group=group)
    torch.testing.assert_close(loss / 2, alone)
    with pytest.raises(ValueError, match="must have the same tokens"):
        ranks.shard(short if group.rank() else batch)
    misfit = {**batch, "labels": short["labels"]}
    with pytest.raises(NotImplementedError, match="`labels` of a batch must begin with the sizes"):
        ranks.shard(misfit)
    error = NotImplementedError if group.rank() else ValueError
    with pytest.raises(error, match=r"`labels` of a batch|must have the same tokens"):
        ranks.shard(misfit if group.rank() else batch)


@pytest.mark.parametrize(
    "program",
    [refused_on_ranks, own_losses, loops, wrong_models, other_tokens, changed_behind_the_loader],
)
def test_refusals_on_ranks(program, two):
    two.ranks.run(program)


# Plans of batches

MODELS = {
    "llama": hf.LlamaConfig,
    "mistral": hf.MistralConfig,
    "qwen3": hf.Qwen3Config,
    "gemma3": hf.Gemma3TextConfig,
    "gpt_oss": hf.GptOssConfig,
    "llama4": hf.Llama4TextConfig,
}


@pytest.mark.parametrize("name", MODELS)
def test_slices_of_document_lengths(name):
    """Those of the mask functions, which only chunks need."""
    if name == "llama4" and not COUNTS_CHUNKS:
        pytest.skip("this version of transformers counts chunks over the whole pack")
    config = MODELS[name]()
    for key, size in (("sliding_window", 40), ("attention_chunk_size", 40)):
        if getattr(config, key, None) is not None:
            setattr(config, key, size)
    config._attn_implementation = "magi"
    layers = LayerSlices(config)
    lengths = torch.tensor([100, 1, 39, 41, 7])
    positions = torch.cat([torch.arange(x) for x in lengths.tolist()])[None]
    masks = masks_of_layers(config, positions)
    found = layers.of(lengths)
    assert list(found) == list(masks) == list(layers.weights)
    for kind, mask in masks.items():
        assert found[kind].content_key() == slices_from_block_mask(mask).content_key()
    by_functions = found.keys() - layers.windows.keys()
    assert by_functions == ({"chunked_attention"} if name == "llama4" else set())
    if name == "gemma3":
        assert layers.weights == {"full_attention": 4, "sliding_attention": 22}


def test_masks_of_a_pack_must_be_those_of_its_documents(monkeypatch):
    """As with chunks in transformers before 5.23."""

    def masks(config, positions):
        document = (positions[0] == 0).cumsum(0)

        def mask_mod(b, h, q, kv):
            return (q >= kv) & (q // 16 == kv // 16) & (document[q] == document[kv])

        tokens = positions.shape[1]
        return {"chunked_attention": create_block_mask(mask_mod, None, None, tokens, tokens, "cpu")}

    monkeypatch.setattr(sharded_batches, "masks_of_layers", masks)
    with pytest.raises(
        NotImplementedError, match="must see a document in a pack as they see it alone"
    ):
        LayerSlices(hf.Llama4TextConfig(attention_chunk_size=16))


def test_layers_with_a_state_are_refused():
    config = hf.Qwen3NextConfig(num_hidden_layers=4)
    config._attn_implementation = "magi"
    with pytest.raises(NotImplementedError, match=r"\['linear_attention'\] do not run over ranks"):
        LayerSlices(config)


@pytest.fixture(scope="module")
def planner():
    config = config_of("gemma3")
    config._attn_implementation = "magi"
    return BatchPlanner(config, (2, 0), ContextParallelOptions(chunk_size=8))


ROWS = torch.arange(1, 41).view(2, 20)
RIGHT = torch.ones(2, 20, dtype=torch.long)
RIGHT[1, 12:] = 0
HOLE = RIGHT.clone()
HOLE[0, 5:7] = 0
BAD = {
    "no tokens": ({}, ValueError, "`input_ids` of a batch must be a tensor"),
    "flat": ({"input_ids": ROWS[0]}, ValueError, r"must be a tensor \[B, S\], got \[20\]"),
    "images": (
        {"pixel_values": torch.ones(2, 3, 4, 4)},
        NotImplementedError,
        "`pixel_values` of a batch",
    ),
    "kinds": (
        {"token_type_ids": ROWS},
        NotImplementedError,
        "`token_type_ids` of a batch must be 0",
    ),
    "axes": (
        {"position_ids": ROWS.expand(3, 2, 20)},
        NotImplementedError,
        "`position_ids` of a batch must be",
    ),
    "dense": (
        {"attention_mask": torch.ones(2, 1, 20, 20)},
        NotImplementedError,
        "`attention_mask` of a batch must be one of padding",
    ),
    "hole": ({"attention_mask": HOLE}, NotImplementedError, "padding between tokens in row 0"),
    "padding": ({"attention_mask": 0 * RIGHT}, ValueError, "must have a token"),
    "labels": (
        {"attention_mask": RIGHT, "labels": ROWS},
        ValueError,
        "must be -100 where padding would predict them.* place 12 of row 1",
    ),
    "left": (
        {"attention_mask": RIGHT.flip(1), "labels": ROWS.masked_fill(RIGHT.flip(1) == 0, -100)},
        ValueError,
        "must be -100 where padding would predict them.* place 7 of row 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_batches_that_do_not_fit(name, planner):
    given, error, message = BAD[name]
    with pytest.raises(error, match=message):
        planner.plan({"input_ids": ROWS, **given} if given else given)
    with pytest.raises(TypeError, match="a batch must be a dict"):
        planner.plan([ROWS])


def test_documents_of_a_batch(planner):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1], [8, 9, 10, 12, 13, 0, 1, 2]])
    starts = torch.tensor([[1, 0, 0, 1, 0, 1, 1, 0], [1, 0, 0, 1, 0, 1, 0, 0]]).bool()
    assert torch.equal(starts_of_documents(positions, None), starts)
    starts[1, 3] = False  # with an attention_mask only 0 is a border
    assert torch.equal(starts_of_documents(positions, torch.ones_like(positions)), starts)
    in_worker = pickle.loads(pickle.dumps(planner))  # of a loader that spawns it
    planned = pickle.loads(
        pickle.dumps(in_worker.plan({"input_ids": ROWS, "attention_mask": RIGHT}))
    )
    assert planned.kept.tolist() == [*range(20), *range(20, 32)]
    full = planned.plans["full_attention"].slices
    assert full.area() == 20 * 21 // 2 + 12 * 13 // 2


def test_nobody_averages_beside_tensor_parallelism():
    with pytest.warns(
        UserWarning, match=r"tensor parallelism of 2 without FSDP2 \(`fully_shard`\)"
    ):
        trainer._warn_of_own_gradients(torch.nn.Linear(2, 2), 2)


def test_routers_whose_loss_is_added_up():
    given = trainer_of()
    given.model.config.output_router_logits, given.model.config.router_aux_loss_coef = True, 0.5
    with pytest.warns(UserWarning, match=r"all 1 processes.*divide `router_aux_loss_coef` .* 0.5"):
        trainer._warn_of_routers(given)
