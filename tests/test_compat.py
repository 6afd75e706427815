"""Private PyTorch names do what `_compat` says they do."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint

from magi_compile import _compat
from magi_compile._compat import inductor


def causal_mask(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    return torch.full((seqlen_q, seqlen_k), -torch.inf).triu(1)


def formula(q, k, v, mask, softmax_scale):
    scores = q @ k.mT * softmax_scale + mask
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("how", ["full", "is_causal", "mask"])
def test_cpu_flash(how):
    """Forward and backward, keys expanded over a group of heads."""
    torch.manual_seed(0)
    q = torch.randn(2, 3, 70, 24)
    k, v = torch.randn(2, 2, 1, 70, 24).expand(2, 2, 3, 70, 24)
    mask = torch.zeros(70, 70) if how == "full" else causal_mask(70, 70)
    options = (mask if how == "mask" else None, how == "is_causal", 0.3)
    out, lse = _compat.cpu_flash_forward(q, k, v, *options)
    dout = torch.randn_like(out)
    grads = _compat.cpu_flash_backward(dout, (q, k, v, out, lse), *options)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected_out, expected_lse = formula(*leaves, mask, 0.3)
    expected_grads = torch.autograd.grad(expected_out, leaves, dout)
    torch.testing.assert_close(
        (out, lse, *grads), (expected_out, expected_lse, *expected_grads), rtol=1e-4, atol=1e-5
    )


def test_cpu_flash_backward_uses_the_out_and_lse_it_is_given():
    """The gradients of two halves of the keys, with the out and lse of the whole, are those of the whole."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 2, 40, 16)
    out, lse = _compat.cpu_flash_forward(q, k, v, None, False, 0.25)
    dq, dk, dv = _compat.cpu_flash_backward(dout, (q, k, v, out, lse), None, False, 0.25)
    halves = [
        _compat.cpu_flash_backward(dout, (q, k_half, v_half, out, lse), None, False, 0.25)
        for k_half, v_half in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)
    ]
    dq_parts, dk_parts, dv_parts = zip(*halves, strict=True)
    torch.testing.assert_close(sum(dq_parts), dq)
    torch.testing.assert_close(torch.cat(dk_parts, 2), dk)
    torch.testing.assert_close(torch.cat(dv_parts, 2), dv)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['mask'].mask_mod.document", "mask.mask_mod.document"),
        ("G['__import_model_dot_masks'].document", "document"),
        ("___from_numpy(L['window'])", "window"),
        (lambda: "L['document']", "document"),  # a method until torch 2.11
    ],
    ids=["attribute", "global", "numpy", "method"],
)
def test_names_of_inputs(source, name):
    placeholder = SimpleNamespace(_dynamo_source=SimpleNamespace(name=source))
    assert _compat.source_name(placeholder) == name


def test_inputs_without_a_source_have_their_own_name():
    assert _compat.source_name(SimpleNamespace(name="arg0_1")) == "arg0_1"


def test_the_pass_is_pickled_as_its_identity():
    """Inductor's cache key holds it in torch 2.11; a copy is the pass itself."""
    graph_pass = _compat.pre_grad_pass(lambda gm: None, "of a version", options=3)
    again = pickle.loads(pickle.dumps(graph_pass))
    assert type(again) is type(graph_pass) is inductor.PreGradPass
    assert (again.uuid(), again.rewrite) == ("of a version", None)
    other = _compat.pre_grad_pass(print, "of a version", options=4)
    assert pickle.dumps(other) == pickle.dumps(graph_pass)
    assert copy.deepcopy(graph_pass) is graph_pass
    with pytest.raises(AttributeError, match="has no attribute 'PostGradPass'"):
        inductor.PostGradPass  # noqa: B018


def test_versions_of_tensors():
    tensor = torch.zeros(3)
    before = _compat.version_of(tensor)
    tensor.add_(1)
    assert _compat.version_of(tensor) == before + 1
    with torch.inference_mode():
        assert _compat.version_of(torch.zeros(3)) == 0


def test_a_group_without_a_timeout_has_that_of_pytorch():
    """As one of the backend "fake", and of others that have no options."""

    class Backend:
        @property
        def options(self):
            raise RuntimeError("no options")

    default = torch.distributed.constants.default_pg_timeout
    for backend in (SimpleNamespace(options=None), SimpleNamespace(), Backend()):
        group = SimpleNamespace(_device_types=["cpu"], _get_backend=lambda device, x=backend: x)
        assert _compat.timeout_of(group) == default


def test_a_store_that_cannot_be_cloned_is_shared(monkeypatch):
    class Store(torch.distributed.Store):
        pass

    store = Store()
    monkeypatch.setattr("magi_compile._compat.distributed.store_of", lambda group: store)
    assert _compat.own_store_of(None) is store


def test_in_a_backward():
    found = []
    x = torch.ones(1, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(
        lambda x: found.append(_compat.is_in_backward()) or x.exp(), x, use_reentrant=False
    )
    y.backward()
    assert found == [False, True]
    assert not _compat.is_in_backward()
