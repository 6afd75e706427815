"""SandAI's MagiCompiler and this package in one program: it keeps attention for the backward if its list says so."""

import datetime
import tempfile

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pytest.importorskip("magi_compiler")

import magi_compiler
from magi_compiler.config import get_compile_config

import magi_compile
from magi_compile import AttnSlices
from magi_compile.dtensor import SequencePlan, plan
from magi_compile.dtensor.call import ops as cp_ops
from magi_compile.integrations.magi_attention import flex_flash_attn_func
from tests.dtensor.support.ranks import Ranks

WIDTH, HEADS, HEAD_DIM, S = 32, 4, 8, 64
KEPT = ["magi::ffa_fwd", "magi::cp_ffa_fwd"]


class Packed(nn.Module):
    """Documents, as ranges of rows, which attend to themselves."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, ranges: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, HEADS, HEAD_DIM)).unbind(1)
        out, _ = flex_flash_attn_func(q, k, v, ranges, ranges)
        return self.out(2 * out.flatten(1))


class Flex(Packed):
    """PyTorch's FlexAttention, of batch entries."""

    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, S, S, device="cpu")
    attend = staticmethod(flex_attention)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        out = self.attend(*qkv.unbind(0), block_mask=self.mask)
        return self.out(2 * out.transpose(1, 2).flatten(2))


def packed(*borders):
    ranges = torch.tensor([borders[:-1], borders[1:]], dtype=torch.int32).T.contiguous()
    return torch.randn(borders[-1], WIDTH), ranges


def entries(batch):
    return (torch.randn(batch, S, WIDTH),)


class Spread(Packed):
    """One causal sequence over ranks."""

    def forward(self, x: Tensor, plan: SequencePlan) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, HEADS, HEAD_DIM)).unbind(1)
        return self.out(2 * plan.attention(q, k, v).flatten(1))


CASES = {
    "packed": (Packed, {"x": 0, "ranges": 0}, [packed(0, 20, 64), packed(0, 9, 30, 80)]),
    "flex": (Flex, {"x": 0}, [entries(3), entries(5)]),
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    config = get_compile_config()
    monkeypatch.setattr(config, "cache_root_dir", str(tmp_path))
    monkeypatch.setattr(config.recompute_config, "custom_compute_sensitive_ops", [])
    return config


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_it_compiles(name, is_kept, config, forwards, monkeypatch):
    """As eagerly, for two batches; attention runs once in a step, and twice where it is not in the list."""
    make, dynamic, batches = CASES[name]
    if is_kept:
        config.recompute_config.custom_compute_sensitive_ops += KEPT
    model = make()
    with monkeypatch.context() as patch:
        patch.setattr(Flex, "attend", staticmethod(magi_compile.flex_attention))
        wanted = [step(model, batch) for batch in batches]
    with magi_compile.enabled():
        compiled = magi_compiler.magi_compile(model, dynamic_arg_dims=dynamic)
        for batch, expected in zip(batches, wanted, strict=True):
            forwards.clear()
            for x, y in zip(step(compiled, batch), expected, strict=True):
                torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
            assert len(forwards) == (1 if is_kept else 2)


def step(model, batch):
    out = model(*batch)
    return [out, *torch.autograd.grad(out.square().sum(), [*model.parameters()])]


def across_ranks(group, is_kept):
    torch._dynamo.reset()
    config = get_compile_config()
    config.recompute_config.custom_compute_sensitive_ops[:] = KEPT if is_kept else []
    runs = []
    forward = cp_ops.forward
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(config, "cache_root_dir", folder)
        patch.setattr(cp_ops, "forward", lambda *args: runs.append(1) or forward(*args))
        torch.manual_seed(0)
        model, x = Spread(), torch.randn(S, WIDTH)
        p = plan(AttnSlices.causal(S), group)
        wanted = step(model, (p.shard(x, 0), p))
        runs.clear()
        compiled = magi_compiler.magi_compile(model, dynamic_arg_dims={"x": 0})
        found = step(compiled, (p.shard(x, 0), p))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    return len(runs)


@pytest.mark.slow
def test_across_ranks():
    ranks = Ranks(2, timeout=datetime.timedelta(seconds=120))
    try:
        assert ranks.run(across_ranks, True) == [1, 1]
        assert ranks.run(across_ranks, False) == [2, 2]
    finally:
        ranks.close()
