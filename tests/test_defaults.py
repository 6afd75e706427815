"""What a program sets for all of torch, its default dtype and device, changes nothing in this package."""

import ast
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import magi_compile
from magi_compile import make_backend

FACTORIES = frozenset(
    [
        "tensor",
        "as_tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "linspace",
        "eye",
        "rand",
        "randn",
        "randint",
        "randperm",
        "empty_strided",
    ]
)
OF_FLOATS = frozenset(
    ["zeros", "ones", "empty", "linspace", "eye", "rand", "randn", "empty_strided"]
)


def calls_of_factories():
    for path in sorted(Path(magi_compile.__file__).parent.rglob("*.py")):
        if path.parent.name in ("bench", "testing") or "/bench/" in str(path):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if (
                    isinstance(owner, ast.Name)
                    and owner.id == "torch"
                    and node.func.attr in FACTORIES
                ):
                    yield (
                        f"{path.name}:{node.lineno}",
                        node.func.attr,
                        {x.arg for x in node.keywords},
                    )


def test_new_tensors_name_their_device_and_dtype():
    named = list(calls_of_factories())
    assert len(named) > 50
    assert not [place for place, _, names in named if not names & {"device", None}]
    assert not [p for p, name, names in named if name in OF_FLOATS and not names & {"dtype", None}]


def scores_of(score, b, h, q, kv):
    return 20.0 * torch.tanh(score / 20.0)


def biased(score, b, h, q, kv):
    return score * 0.3


@pytest.mark.parametrize("score_mod", [None, scores_of, biased])
@pytest.mark.parametrize("door", ["eager", "compiled"])
def test_default_dtype_and_device(door, score_mod):
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 2, 40, 16).unbind()]
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 40, 40, device="cpu")
    attend = magi_compile.flex_attention
    if door == "compiled":
        attend = torch.compile(torch_flex_attention, backend=make_backend("aot_eager"))

    def results():
        torch._dynamo.reset()
        out, aux = attend(*inputs, score_mod, mask, return_aux=AuxRequest(lse=True))
        loss = out.square().sum() + aux.lse.sum()
        return [out, aux.lse, *torch.autograd.grad(loss, inputs)]

    expected = results()
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            found = results()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        torch.testing.assert_close(found, expected)
