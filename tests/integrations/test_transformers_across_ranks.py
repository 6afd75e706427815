"""Models of transformers inside of `context_parallel`:
a training step over two ranks has the numbers of one process."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import magi_compile
import magi_compile.integrations.transformers
from magi_compile import AttnSlices
from magi_compile.dtensor import ContextParallelOptions, context_parallel, plan
from magi_compile.integrations.transformers import magi_attention
from magi_compile.masks import pack_shared_prefixes
from tests.dtensor.support.ranks import Ranks
from tests.integrations.models import SEQLEN, make_model, positions, tokens

MIXED = ("qwen3", "gemma2", "gemma3", "gpt_oss")  # windows of 40 in every other layer


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(2)
    yield started
    started.close()


def batch(is_mixed):
    """Tokens, positions, labels that are shifted within documents, and the mask or masks, all of the whole sequence."""
    words, place = tokens(1), positions()
    document = (place[0] == 0).cumsum(0)
    is_last = document.diff(append=document[:1] - 1) != 0
    labels = words.roll(-1, 1).masked_fill(is_last[None], -100)

    def causal_in_documents(b, h, q, kv):
        return (document[q] == document[kv]) & (q >= kv)

    def window_in_documents(b, h, q, kv):
        return causal_in_documents(b, h, q, kv) & (q - kv < 40)

    full, window = (
        magi_compile.create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, "cpu")
        for mask_mod in (causal_in_documents, window_in_documents)
    )
    mixed = {"full_attention": full, "sliding_attention": window}
    return words, place, labels, mixed if is_mixed else full


def train(group, name, compiled, around=context_parallel):
    """The loss and all gradients of a step."""
    torch._dynamo.reset()
    words, place, labels, mask = batch(name in MIXED)
    model, count = make_model(name), (labels != -100).sum()
    quick = magi_compile.make_backend("aot_eager")
    forward = torch.compile(model, backend=quick, fullgraph=True) if compiled else model
    cp = {"buffers": [words, place, labels], "buffer_seq_dims": [1, 1, 1]}
    cp["buffer_padding"] = [0, 0, -100]
    with around(group, mask=mask, **cp):
        inputs = {"input_ids": words, "position_ids": place, "attention_mask": mask}
        shifted = {"labels": labels, "shift_labels": labels, "num_items_in_batch": count}
        loss = forward(**inputs, **shifted).loss  # the sum over this rank's tokens, over all labels
        loss.backward()
    results = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    if around is context_parallel:
        for result in results:
            dist.all_reduce(result, group=group)
    return results


def train_by_plans(group, name, how):
    """The same without a context: the masks carry their plans."""
    torch._dynamo.reset()
    words, place, labels, mask = batch(name in MIXED)
    model, count = make_model(name), (labels != -100).sum()
    if how == "checkpointed":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    quick = magi_compile.make_backend("aot_eager")
    forward = torch.compile(model, backend=quick, fullgraph=True) if how == "compiled" else model
    plans = plan(masks=mask if isinstance(mask, dict) else {"": mask}, mesh=group)
    masks = {kind: x.block_mask for kind, x in plans.items()}
    tokens_of_rank = next(iter(plans.values()))
    words, place = (tokens_of_rank.shard(x, 1) for x in (words, place))
    labels = tokens_of_rank.labels(labels, 1, is_shifted=True)
    loss = forward(
        input_ids=words,
        position_ids=place,
        attention_mask=masks if isinstance(mask, dict) else masks[""],
        labels=labels,
        shift_labels=labels,
        num_items_in_batch=count,
    ).loss
    loss.backward()
    results = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for result in results:
        dist.all_reduce(result, group=group)
    return results


def wrong_use_of_plans(group):
    words, place, _, mask = batch(False)
    p = plan(mask, group)
    words, place = (p.shard(x, 1) for x in (words, place))
    inputs = {"input_ids": words, "attention_mask": p.block_mask, "use_cache": False}
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"`position_ids` must be given.*on every"):
        model(**inputs)
    lists = {"cu_seq_lens_q": torch.tensor([0, SEQLEN // 2], dtype=torch.int32)}
    with pytest.raises(NotImplementedError, match="`cu_seq_lens_q` must be None with the mask of"):
        model(**inputs, position_ids=place, **lists)


def without_a_mask(group):
    words, place, labels, mask = batch(False)
    cp = {"buffers": [words, place, labels], "buffer_seq_dims": [1, 1, 1]}
    with (
        pytest.raises(ValueError, match="must be the one that context_parallel was given"),
        context_parallel(group, mask=mask, **cp, buffer_padding=[0, 0, -100]),
    ):
        make_model("llama")(input_ids=words, position_ids=place)


def without_positions(group, name, how):
    """All ranks get the error, and the model runs with positions after it."""
    torch._dynamo.reset()
    words, place, _, mask = batch(name in MIXED)
    model = make_model(name)
    if how == "checkpointed":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    quick = magi_compile.make_backend("aot_eager")
    forward = torch.compile(model, backend=quick, fullgraph=True) if how == "compiled" else model
    cp = {"buffers": [words, place], "buffer_seq_dims": [1, 1], "buffer_padding": [0, 0]}
    with context_parallel(group, mask=mask, **cp):
        inputs = {"input_ids": words, "attention_mask": mask, "use_cache": False}
        with pytest.raises(ValueError, match=r"`position_ids` must be given.*got 0 to .* on every"):
            forward(**inputs)
        assert bool(forward(**inputs, position_ids=place).logits.isfinite().all())


def documents_of_one_rank_each(group):
    """Positions that are given may be those that each rank would count."""
    half = SEQLEN // 2
    words, place = tokens(1), torch.arange(half).repeat(2)[None]
    document = torch.arange(SEQLEN) // half

    def mask_mod(b, h, q, kv):
        return (document[q] == document[kv]) & (q >= kv)

    mask = magi_compile.create_block_mask(mask_mod, None, None, SEQLEN, SEQLEN, "cpu")
    model = make_model("llama")
    with torch.no_grad():
        alone = model(input_ids=words, position_ids=place, attention_mask=mask).logits
        cp = {"buffers": [words, place], "buffer_seq_dims": [1, 1]}
        options = ContextParallelOptions(chunk_size=half)
        with context_parallel(group, mask=mask, options=options, **cp) as plan:
            assert torch.equal(place[0], torch.arange(half))
            given = {"position_ids": place, "attention_mask": mask}
            logits = plan.unshard(model(input_ids=words, **given).logits, 1)
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


RUNS = [
    *("llama eager", "llama compiled", "gemma3 eager", "gpt_oss compiled"),
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("qwen3 compiled", "gemma2 compiled")),
]


@pytest.mark.parametrize("run", RUNS)
def test_a_step_is_that_of_one_process(run, ranks):
    name, how = run.split()
    ours, _ = ranks.run(train, name, how == "compiled")
    alone = train(None, name, False, lambda *_, **__: nullcontext())
    torch.testing.assert_close(ours, alone, atol=1e-4, rtol=1e-4)


PLANNED = ["llama eager", "llama checkpointed", "gemma3 eager"]
PLANNED += ["gemma2 compiled", pytest.param("gpt_oss compiled", marks=pytest.mark.slow)]


@pytest.mark.parametrize("run", PLANNED)
def test_masks_with_plans_need_no_context(run, ranks):
    name, how = run.split()
    ours, _ = ranks.run(train_by_plans, name, how)
    alone = train(None, name, False, lambda *_, **__: nullcontext())
    torch.testing.assert_close(ours, alone, atol=1e-4, rtol=1e-4)


def test_masks_with_plans_have_the_documents(ranks):
    ranks.run(wrong_use_of_plans)


def with_a_bias(group):
    q, k, v = (torch.randn(1, 4, SEQLEN, 8) for _ in range(3))
    module = torch.nn.Module()
    bias = torch.zeros(1, 4, SEQLEN // 2, SEQLEN // 2)
    with context_parallel(group, mask=AttnSlices.causal(SEQLEN)) as plan:
        local = [x[:, :, : plan.seqlen_local] for x in (q, k, v)]
        with pytest.raises(NotImplementedError, match="`position_bias` must be None inside"):
            magi_attention(module, *local, plan.block_mask, position_bias=bias)


def test_a_bias_of_a_rank(ranks):
    """Of the positions that tokens have on their rank."""
    ranks.run(with_a_bias)


def test_the_mask_must_be_given(ranks):
    """transformers would make one of the tokens that a rank has."""
    ranks.run(without_a_mask)


@pytest.mark.parametrize(
    "run", ["llama eager", "llama checkpointed", "llama compiled", "gemma3 eager"]
)
def test_positions_must_be_given(run, ranks):
    """A model would count the tokens that a rank has."""
    ranks.run(without_positions, *run.split())


def test_positions_that_are_given_may_be_those_of_each_rank(ranks):
    ranks.run(documents_of_one_rank_each)


def shared_prefixes(group):
    """Prompts once, over ranks: loss and gradients of a batch on one process that repeats the prompts."""
    generator = torch.Generator().manual_seed(3)

    def words(*lengths):
        return [torch.randint(3, 100, (n,), generator=generator).tolist() for n in lengths]

    prompts, rollouts = words(60, 35), [words(20, 13, 31), words(9, 40)]
    packed = pack_shared_prefixes(prompts, rollouts, pad_to_multiple_of=16)
    inputs = [packed.input_ids, packed.position_ids, packed.shift_labels.clone()]
    count, mask, model = (packed.labels != -100).sum(), packed.block_mask, make_model("llama")
    cp = {"buffers": inputs, "buffer_seq_dims": [1, 1, 1], "buffer_padding": [0, 0, -100]}
    options = ContextParallelOptions(chunk_size=16)
    with context_parallel(group, mask=mask, options=options, **cp):
        tokens_, place, labels = inputs
        shifted = {"labels": labels, "shift_labels": labels, "num_items_in_batch": count}
        loss = model(tokens_, position_ids=place, attention_mask=mask, **shifted).loss
        loss.backward()
    ours = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    for result in ours:
        dist.all_reduce(result, group=group)
    alone, total = make_model("llama"), torch.zeros(())
    for prompt, own in zip(prompts, rollouts, strict=True):
        for rollout in own:
            tokens_ = torch.tensor([prompt + rollout])
            labels = torch.tensor([[-100] * len(prompt) + rollout])
            total += alone(tokens_, labels=labels, num_items_in_batch=count).loss
    total.backward()
    wanted = [total.detach(), *(parameter.grad for parameter in alone.parameters())]
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


def test_shared_prefixes(ranks):
    ranks.run(shared_prefixes)
