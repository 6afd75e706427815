"""The model of all programs, batches of packed documents whose layout changes in every step,
and the check of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import magi_compile
from magi_compile.kernels.select import load
from magi_compile.lowering.report import REPORT

NHEADS_Q, NHEADS_KV, HEAD_DIM, SEQLEN = 4, 2, 16, 128
DIM = NHEADS_Q * HEAD_DIM
LAYOUTS = [(128,), (50, 78), (1, 2, 125), (40, 40, 40, 8)]


def causal_documents(document: Tensor) -> BlockMask:
    """`document [S]` is the document of each token."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (document[q] == document[kv]) & (q >= kv)

    size = document.shape[0]
    return create_block_mask(mask_mod, None, None, size, size, device=document.device)


def dense_causal_documents(document: Tensor) -> Tensor:
    return (document[:, None] == document).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(NHEADS_Q // NHEADS_KV, 1) for x in (k, v))
    scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]):
        super().__init__()
        self.attend = attend
        self.heads = (NHEADS_Q, NHEADS_KV, NHEADS_KV)
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, sum(self.heads) * HEAD_DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor, mask: BlockMask | Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        y = self.attend(*qkv.split(self.heads, 1), mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Two blocks; `around` calls a block, where checkpointing has its place."""

    def __init__(
        self,
        attend: Callable[..., Tensor] = attend,
        make_mask: Callable[[Tensor], BlockMask | Tensor] = causal_documents,
        around: Callable[..., Tensor] | None = None,
    ):
        super().__init__()
        self.make_mask, self.around = make_mask, around
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        mask = self.make_mask(document)
        for block in self.blocks:
            x = block(x, mask) if self.around is None else self.around(block, x, mask)
        return x


def backend_of(door: str) -> str | Callable[..., Any]:
    """What `torch.compile` takes for a door of `tests.programs.programs`."""
    if door == "quick":
        return magi_compile.make_backend("aot_eager")
    return {"magi": "magi", "enable": "inductor"}[door]


def make_model(around: Callable[..., Tensor] | None = None, device: str = "cpu") -> Model:
    torch.manual_seed(0)
    return Model(around=around).to(device)


def batch(step: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x, the document of each token, and what the output is multiplied by for the loss."""
    generator = torch.Generator().manual_seed(step)
    x, weights = torch.randn(2, 2, SEQLEN, DIM, generator=generator)
    lengths = torch.tensor(LAYOUTS[step % len(LAYOUTS)])
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return x.to(device), document.to(device), weights.to(device)


def reference(
    state: dict[str, Tensor], steps: Iterable[int], device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The outputs of dense fp64 attention in these steps, and the sums of their gradients by the parameter's name."""
    model = Model(dense_attend, dense_causal_documents).double().to(device)
    model.load_state_dict(state)
    outs = []
    for step in steps:
        x, document, weights = batch(step, device)
        outs.append(model(x.double(), document))
        (outs[-1] * weights).sum().backward()
    return [out.detach() for out in outs], gradients_of(model)


def outputs(model: nn.Module, step: int) -> Tensor:
    """What `reference` says of the output of a step, without gradients."""
    with torch.inference_mode(False), torch.enable_grad():
        return reference(model.state_dict(), [step])[0][0]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the names in `Model`, whatever has wrapped it."""
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def distance(ours: Tensor, expected: Tensor) -> float:
    """The norm of the difference, as a share of that of `expected`."""
    return float((ours.detach().double() - expected).norm() / expected.norm())


def assert_near(ours: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert ours.shape == expected.shape, f"{what}: {ours.shape} instead of {expected.shape}"
    error = distance(ours, expected)
    assert error <= tolerance, f"{what} differs by {error:.1e} of its norm"


def check_gradients(model: nn.Module, expected: dict[str, Tensor], tolerance: float) -> None:
    ours = gradients_of(model)
    assert ours.keys() == expected.keys(), f"gradients of {sorted(ours)}"
    for name, grad in expected.items():
        assert_near(ours[name], grad, tolerance, f"the gradient of {name}")


def check_training(
    run: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module,
    state: dict[str, Tensor] | None = None,
    *,
    steps: Iterable[int] = range(4),
    tolerance: float = 1e-4,
    device: str = "cpu",
    recompiles: bool = False,
) -> None:
    """Training steps of `run`, which calls `model`, whose parameters are `state`: outputs, all gradients, one
    compilation, and attention that is lowered."""
    state = model.state_dict() if state is None else state
    graphs = None
    for step in steps:
        (expected,), grads = reference(state, [step], device)
        x, document, weights = batch(step, device)
        model.zero_grad()
        out = run(x, document)
        (out.float() * weights).sum().backward()
        assert_near(out, expected, tolerance, f"the output of step {step}")
        check_gradients(model, grads, tolerance)
        compiled = num_graphs()
        assert recompiles or graphs in (None, compiled), f"step {step} has compiled again"
        graphs = compiled
    check_lowered()


def check_inference(
    run: Callable[[Tensor, Tensor], Tensor],
    model: nn.Module,
    *,
    steps: Iterable[int] = range(4),
    tolerance: float = 1e-4,
) -> None:
    """Outputs of `run` under what the caller has set up: `no_grad`, `inference_mode`."""
    for step in steps:
        expected = outputs(model, step)
        x, document, _ = batch(step)
        assert_near(run(x, document), expected, tolerance, f"the output of step {step}")
    check_lowered()


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


RUNS: Counter[str] = Counter()  # of our kernels, by name


def count_runs() -> None:
    """Counts in `RUNS` from now on. What Inductor finds in its cache runs without a line in the lowering report."""
    for name in ("hopper", "triton") if torch.cuda.is_available() else ("cpu",):
        kind = type(load(name))
        kind.forward = _counted(name, kind.forward)


def _counted(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        RUNS[name] += 1
        return forward(*args, **kwargs)

    return counted


def check_lowered() -> None:
    assert not REPORT.refused, f"attention was not lowered: {REPORT.refused}"
    assert RUNS, "no kernel of ours has run"


def sgd(model: nn.Module) -> None:
    """One step of descent, so that later steps have other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
