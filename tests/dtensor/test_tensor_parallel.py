"""Context parallelism and tensor parallelism of one mesh: a transformer whose heads are over "tp" and whose tokens are
over "cp" has the loss and the gradients of one process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from magi_compile.dtensor import context_parallel
from tests.dtensor import transformer
from tests.dtensor.test_packing_with_context_parallel import CUTS, ODD, OPTIONS, graphs, step_of
from tests.dtensor.transformer import HEAD_DIM, block_mask, document_of, labels_of, tokens_of

NHEADS = 4
DIM = NHEADS * HEAD_DIM


class Layer(nn.Module):
    def __init__(self, nheads_kv):
        super().__init__()
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = (nn.Linear(DIM, nheads_kv * HEAD_DIM) for _ in range(2))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x, angles, attention, mask):
        q, k, v = (
            f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = rotated(q, angles), rotated(k, angles)
        x = x + self.out(attention(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def rotated(x, angles):
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    if isinstance(x, DTensor):
        cos, sin = (DTensor.from_local(y, x.device_mesh, [Replicate()]) for y in (cos, sin))
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Transformer(nn.Module):
    """The sum of the losses of all tokens that predict something."""

    def __init__(self, attention, nheads_kv):
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(transformer.VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer(nheads_kv) for _ in range(2))
        self.head = nn.Linear(DIM, transformer.VOCABULARY)

    def forward(self, tokens, positions, labels, mask):
        x = self.embedding(tokens)
        angles = positions[:, None] * 0.5 ** torch.arange(HEAD_DIM // 2)
        for layer in self.layers:
            x = layer(x, angles, self.attention, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def make(attention, nheads_kv):
    torch.manual_seed(0)
    return Transformer(attention, nheads_kv)


def on_one_process(name, nheads_kv, document, tokens):
    model, at = make(transformer.dense, nheads_kv), torch.arange(len(document))
    mask = transformer.mask_mod(name, document)(0, 0, at[:, None], at[None])
    loss = model(tokens, at, labels_of(tokens, document), mask)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


class AllHeads(ParallelStyle):
    """A projection that every rank has all of: fewer heads of keys than ranks."""

    def _apply(self, module, device_mesh):
        def distributed(module, inputs, mesh):
            return DTensor.from_local(inputs[0], mesh, [Replicate()])

        return distribute_module(module, device_mesh, input_fn=distributed)


def parallelize(model, mesh, nheads_kv, is_local):
    """Heads and hidden units over `mesh`, in PyTorch's styles. Projections give DTensors, or this rank's heads."""
    of_heads = ColwiseParallel(use_local_output=is_local)
    of_keys = of_heads if nheads_kv % mesh.size() == 0 else AllHeads()
    for layer in model.layers:
        styles = {"q": of_heads, "k": of_keys, "v": of_keys, "out": RowwiseParallel()}
        parallelize_module(
            layer, mesh, {**styles, "up": ColwiseParallel(), "down": RowwiseParallel()}
        )


def check(p, model, loss, expected, factor=1):
    torch.testing.assert_close(p.sum(loss) / factor, expected[0], rtol=1e-5, atol=1e-3)
    for name, x in model.named_parameters():
        grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
        if factor == 1:  # or FSDP has added up
            grad = p.sum(grad)
        error = (grad - expected[1][name]).abs().max() / expected[1][name].abs().max()
        assert error < 2e-5, f"{name}: {error:.1e}"


def train(group, attention, nheads_kv, backend, is_local=False, has_fsdp=False):
    """Steps with new masks on a mesh of data, tokens and heads. How many graphs that took."""
    mesh = DeviceMesh("cpu", [[[0, 1], [2, 3]]], mesh_dim_names=("dp", "cp", "tp"))
    model = make(getattr(transformer, attention), nheads_kv)
    parallelize(model, mesh["tp"], nheads_kv, is_local)
    if has_fsdp:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["cp"])
        fully_shard(model, mesh=mesh["cp"])
    factor = 2 if has_fsdp else 1  # FSDP has the mean over ranks
    step = step_of(model, backend)
    for name, cuts in zip(("documents", "window", "documents"), CUTS, strict=False):
        document, tokens = document_of(cuts, ODD), tokens_of(2, ODD)
        expected = on_one_process(name, nheads_kv, document, tokens)
        mask, labels = block_mask(name, document), labels_of(tokens, document)
        model.zero_grad()
        with context_parallel(
            mesh["cp"],
            mask=mask,
            buffers=[tokens, positions := torch.arange(ODD), labels],
            buffer_seq_dims=[1, 0, 1],
            buffer_padding=[0, 0, -100],
            options=OPTIONS,
        ) as p:
            given = p if attention == "planned" else mask
            loss = step(tokens, positions, labels, given) * factor
            loss.backward()
        check(p, model, loss, expected, factor)
    return graphs()


# Each way to call attention, eagerly and in a graph, with heads of keys that divide or that do not.
@pytest.mark.parametrize(
    ("attention", "backend", "nheads_kv"),
    [
        *[("flex_attention", None, 2), ("our_flex_attention", None, 1), ("planned", None, 2)],
        ("flex_attention", "aot_eager", 1),
        *(
            pytest.param(*run, marks=pytest.mark.slow)
            for run in (
                *[("flex_attention", None, 1), ("our_flex_attention", None, 2)],
                *[("planned", None, 1), ("planned", "aot_eager", 1)],
                ("our_flex_attention", "aot_eager", 2),
            )
        ),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(ranks_of, attention, backend, nheads_kv):
    found = ranks_of(4).run(train, attention, nheads_kv, backend)
    assert found == [0 if backend is None else 1] * 4


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_local_heads(ranks_of, backend):
    ranks_of(4).run(train, "flex_attention", 2, backend, True)


@pytest.mark.parametrize("nheads_kv", [2, 1])
def test_parameters_over_the_ranks_of_the_tokens(ranks_of, nheads_kv):
    ranks_of(4).run(train, "flex_attention", nheads_kv, None, False, True)
