"""`activate_flash_attention_impl("MAGI")`: varlen_attn and scaled_dot_product_attention on our kernels,
beside dense attention."""

import inspect

import pytest
import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn

from magi_compile import _warnings
from magi_compile.integrations import torch_attention as door
from magi_compile.kernels.cpu import CpuKernel

PARAMETERS = inspect.signature(varlen_attn).parameters
GQA = {"enable_gqa": True} if "enable_gqa" in PARAMETERS else {}  # not in PyTorch 2.11

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


@pytest.fixture
def active(monkeypatch):
    monkeypatch.setattr(_warnings, "_said", set())
    activate_flash_attention_impl("MAGI")
    yield
    restore_flash_attention_impl()


@pytest.fixture
def forwards(monkeypatch):
    runs = []
    forward = CpuKernel.forward
    monkeypatch.setattr(
        CpuKernel, "forward", lambda *args, **rest: runs.append(1) or forward(*args, **rest)
    )
    return runs


def starts(lengths, device="cpu"):
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32).to(device)


def packed(total_q, total_k, heads=(4, 2), head_dim=16, **options):
    generator = torch.Generator().manual_seed(0)
    sizes = ((total_q, heads[0]), (total_k, heads[1]), (total_k, heads[1]))
    tensors = [torch.randn(*size, head_dim, generator=generator) for size in sizes]
    return [tensor.to(**options).requires_grad_() for tensor in tensors]


def dense(tensors, lengths_q, lengths_k, window=(-1, -1)):
    """One sequence after the other; windows are aligned at the last row and key. Rows that see nothing give 0."""
    parts = []
    q, k, v = (x.double() for x in tensors)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for i, j, w in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
        diagonal = torch.arange(len(i), device=q.device)[:, None] + len(j) - len(i)
        key = torch.arange(len(j), device=q.device)
        sees = torch.ones(len(i), len(j), dtype=torch.bool, device=q.device)
        if window[0] >= 0:
            sees &= key >= diagonal - window[0]
        if window[1] >= 0:
            sees &= key <= diagonal + window[1]
        scores = torch.einsum("qhd,khd->hqk", i, j) * q.shape[2] ** -0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0.0)
        parts.append(torch.einsum("hqk,khd->qhd", weights, w))
    return torch.cat(parts)


def gradients(out, tensors):
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    return torch.autograd.grad((out * weights.view_as(out)).sum(), tensors)


def check(tensors, out, wanted, **tolerance):
    torch.testing.assert_close(out, wanted.to(out.dtype), **tolerance)
    ours = gradients(out, tensors)
    torch.testing.assert_close(ours, gradients(wanted, tensors), **tolerance)


CASES = {
    "full": ((30, 1, 25), (30, 1, 25), (-1, -1)),
    "causal": ((30, 1, 25), (30, 1, 25), (-1, 0)),
    "window": ((60, 20), (60, 20), (15, 0)),
    "both_sides": ((60, 20), (60, 20), (10, 5)),
    "right": ((60, 20), (60, 20), (-1, 4)),
    "more_keys": ((20, 10), (50, 30), (-1, 0)),
    "more_rows": ((50, 30), (20, 30), (-1, 0)),
    "empty": ((30, 0, 25), (30, 0, 25), (-1, 0)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_varlen(case, active, forwards):
    lengths_q, lengths_k, window = case
    tensors = packed(sum(lengths_q), sum(lengths_k))
    lists = (starts(lengths_q), starts(lengths_k), max(lengths_q), max(lengths_k))
    out = varlen_attn(*tensors, *lists, window_size=window, **GQA)
    assert len(forwards) == 1
    check(tensors, out, dense(tensors, lengths_q, lengths_k, window), atol=1e-5, rtol=1e-4)


def test_scale_and_statistics(active):
    from torch.nn.attention.varlen import AuxRequest

    tensors = packed(40, 40, heads=(2, 2))
    lists = (starts((40,)), starts((40,)), 40, 40)
    with torch.no_grad():
        out, lse = varlen_attn(*tensors, *lists, scale=0.5, return_aux=AuxRequest(lse=True))
        q, k, v = tensors
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.5
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))


@pytest.mark.parametrize("wants", ["out", "lse", "both"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_of_the_log_sum_exp(is_compiled, wants, active):
    """As attention sinks need them; PyTorch's own autograd of the op drops them."""
    from torch.nn.attention.varlen import AuxRequest

    tensors, lists = packed(40, 40, heads=(2, 2)), starts((25, 15))

    def attend(q, k, v):
        arguments = (lists, lists, 25, 25)
        return varlen_attn(
            q, k, v, *arguments, window_size=(-1, 0), return_aux=AuxRequest(lse=True)
        )

    def loss(out, lse):
        parts = {"out": out.square().sum(), "lse": lse.sin().sum()}
        parts["both"] = (out * torch.sigmoid(lse.T - 0.5)[..., None]).square().sum()
        return parts[wants]

    q, k, v = tensors
    document = torch.arange(40) >= 25
    sees = (document[:, None] == document) & torch.ones(40, 40, dtype=torch.bool).tril()
    scores = (torch.einsum("qhd,khd->hqk", q, k) / 4).masked_fill(~sees, -torch.inf)
    wanted = loss(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1))
    call = torch.compile(attend, backend="aot_eager", fullgraph=True) if is_compiled else attend
    out, lse = call(*tensors)
    ours = torch.autograd.grad(loss(out, lse), tensors, allow_unused=True)
    theirs = torch.autograd.grad(wanted, tensors, allow_unused=True)
    for mine, their in zip(ours, theirs, strict=True):
        their = torch.zeros_like(v) if their is None else their  # v says nothing about the lse
        torch.testing.assert_close(mine, their, atol=1e-5, rtol=1e-4)


def test_gradients_of_the_log_sum_exp_of_a_call_that_is_not_ours(active):
    q, k, v = (x.detach() for x in packed(40, 40, heads=(2, 2)))
    tensors = (q, torch.zeros(2, 40), q, k, v, starts((40,)), None, q, torch.zeros(2, 40))
    with pytest.raises(NotImplementedError, match=r"log-sum-exp.*here: `cu_seq_k` is None"):
        torch.ops.magi.varlen_backward(*tensors, True, None, None)


@pytest.mark.parametrize("name", [x for x in ("seqused_k", "block_table") if x in PARAMETERS])
def test_gradients_of_what_is_for_inference(name, active, monkeypatch):
    q, k, v = packed(40, 40, heads=(2, 2))
    values = (q.detach(), torch.zeros(2, 40), torch.zeros(2))
    monkeypatch.setattr(door, "below_autograd", lambda *_: values)
    lists = (starts((40,)), starts((40,)), 40, 40)
    if name == "block_table":
        k, v = (x[None] for x in (k, v))
    with pytest.raises(RuntimeError, match=f"`{name}` must be None where gradients are wanted"):
        varlen_attn(q, k, v, *lists, **{name: torch.zeros(1, dtype=torch.int32)})


def test_compiled(active, forwards):
    lengths, others = (30, 34), (10, 54)
    tensors = packed(64, 64)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q, k, v, lists):
        return varlen_attn(q, k, v, lists, lists, 64, 64, window_size=(-1, 0), **GQA)

    for layout in (lengths, others):
        out = attend(*tensors, starts(layout))
        check(tensors, out, dense(tensors, layout, layout, (-1, 0)), atol=1e-5, rtol=1e-4)
    assert len(forwards) == 2


def test_into_a_tensor(active, forwards):
    from torch.nn.attention import varlen

    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this PyTorch has no varlen_attn_out")
    tensors = packed(40, 40)
    out = torch.empty_like(tensors[0])
    lists = (starts((40,)), starts((40,)), 40, 40)
    with torch.no_grad():
        varlen.varlen_attn_out(out, *tensors, *lists, **GQA)
    assert len(forwards) == 1
    torch.testing.assert_close(out, dense(tensors, (40,), (40,)).float(), atol=1e-5, rtol=1e-4)


def test_slices_are_shared_and_renewed(active, monkeypatch):
    """Layers of a step share them; lists that are written to are read again."""
    made = []
    of_lists = door.AttnSlices.from_cu_seqlens.__func__

    def count(cls, *args, **kwargs):
        made.append(1)
        return of_lists(cls, *args, **kwargs)

    monkeypatch.setattr(door.AttnSlices, "from_cu_seqlens", classmethod(count))
    tensors, lists = packed(64, 64), starts((30, 34))
    arguments = {"window_size": (-1, 0), **GQA}
    for layout, wanted in (((30, 34), 1), ((10, 54), 2)):
        lists.copy_(starts(layout))
        for _ in range(3):
            out = varlen_attn(*tensors, lists, lists, 64, 64, **arguments)
        check(tensors, out, dense(tensors, layout, layout, (-1, 0)), atol=1e-5, rtol=1e-4)
        assert len(made) == wanted


def test_tokens_behind_the_last_sequence(active):
    """They give 0 and get no gradients."""
    tensors, lists = packed(50, 50), starts((30,))
    out = varlen_attn(*tensors, lists, lists, 30, 30, window_size=(-1, 0), **GQA)
    wanted = dense([x[:30] for x in tensors], (30,), (30,), (-1, 0))
    check(tensors, out, torch.cat([wanted, wanted.new_zeros(20, 4, 16)]), atol=1e-5, rtol=1e-4)


def test_lists_beyond_the_tokens(active):
    lists = starts((30, 20))
    with pytest.raises(
        ValueError, match=r"`cu_seq_q` must end at or before the last of 40 tokens, got 50"
    ):
        varlen_attn(*packed(40, 40), lists, lists, 30, 30, **GQA)


@pytest.mark.parametrize(
    ("cu_seq", "error", "message"),
    [
        ([1, 40], ValueError, r"`cu_seq_q` must start at 0, got 1"),
        ([0, 30, 20, 40], ValueError, r"`cu_seq_q` must never decrease, got \[30, 20\] at 1"),
        ([0.0, 40.0], TypeError, r"`cu_seq_q` must hold int32 or int64 values, got torch.float32"),
    ],
)
def test_wrong_lists_by_the_names_of_varlen_attn(cu_seq, error, message):
    q = torch.randn(40, 2, 16)
    lists = torch.tensor(cu_seq)
    given = {"query": q, "key": q, "value": q, "cu_seq_q": lists, "cu_seq_k": lists}
    with pytest.raises(error, match=message):
        door.call_of_varlen({**given, "is_causal": True, "scale": None})


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ((1, 2, 3), r"`window_size` must be \(left, right\), got \(1, 2, 3\)"),
        ((-5, 0), "`window_size` must hold None, -1 or lengths >= 0"),
    ],
)
def test_wrong_windows_by_the_name_of_varlen_attn(window, message):
    q, lists = torch.randn(40, 2, 16), torch.tensor([0, 40])
    given = {"query": q, "key": q, "value": q, "cu_seq_q": lists, "cu_seq_k": lists}
    with pytest.raises(ValueError, match=message):
        door.call_of_varlen({**given, "is_causal": True, "scale": None, "window_size": window})


def test_lists_of_different_lengths():
    q = torch.randn(40, 2, 16)
    lists = {"cu_seq_q": torch.tensor([0, 40]), "cu_seq_k": torch.tensor([0, 20, 40])}
    with pytest.raises(
        ValueError, match=r"`cu_seq_k` must have the length of `cu_seq_q` \(2\), got 3"
    ):
        door.call_of_varlen(
            {"query": q, "key": q, "value": q, **lists, "is_causal": True, "scale": None}
        )


REFUSED = {
    "seqused_k": torch.tensor([5], dtype=torch.int32),
    "block_table": torch.zeros(1, 1, dtype=torch.int32),
    "num_splits": 1,
}


@pytest.mark.parametrize("name", [name for name in REFUSED if name in PARAMETERS])
def test_what_goes_to_pytorch(name, active, forwards, caplog):
    """With one warning. PyTorch's own has no kernel for CPUs, and says so."""
    q, k, v = packed(40, 40, heads=(2, 2))
    if name == "block_table":
        k, v = (x[None] for x in (k, v))
    lists = (starts((40,)), starts((40,)), 40, 40)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
                varlen_attn(q, k, v, *lists, **{name: REFUSED[name]})
    assert not forwards
    (warning,) = [r.message for r in caplog.records if r.name == "magi_compile"]
    assert "torch_attn._varlen_attn.default runs on PyTorch's own flash attention" in warning
    assert f"`{name}` is given" in warning


def given_of_sdpa(q, k, v, **options):
    names = {"query": q, "key": k, "value": v}
    return {**names, "dropout_p": 0.0, "is_causal": False, "scale": None, **options}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dropout_p": 0.1}, "`dropout_p` is 0.1"),
        ({"return_debug_mask": True}, "`return_debug_mask` is set"),
        ({"is_causal": True, "key": torch.randn(2, 4, 9, 16)}, "causal mask of 30 rows and 9 keys"),
        ({"value": torch.randn(2, 4, 30, 8)}, "`value` has head_dim 8 and `query` has 16"),
        ({"key": torch.randn(2, 3, 30, 16)}, "4 heads of `query` are not a multiple of the 3"),
        ({"query": torch.randn(2, 4, 30, 16).double()}, "no kernel can run"),
    ],
)
def test_why_sdpa_is_not_ours(changes, why):
    tensors = [torch.randn(2, 4, 30, 16) for _ in range(3)]
    assert why in door.call_of_sdpa({**given_of_sdpa(*tensors), **changes})


def test_why_varlen_is_not_ours():
    q, k, v = packed(40, 40)
    given = {"query": q, "key": k, "value": v, "cu_seq_q": starts((40,)), "cu_seq_k": None}
    assert door.call_of_varlen({**given, "is_causal": True, "scale": None}) == "`cu_seq_k` is None"


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_as_a_gpu_would_call_it(is_causal):
    """The two functions that a GPU's dispatcher gets, called by hand with tensors of a CPU."""
    q, k, v = (torch.randn(2, heads, 30, 16, requires_grad=True) for heads in (4, 2, 2))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, enable_gqa=True
    )
    dout = torch.randn_like(wanted)
    grads = torch.autograd.grad(wanted, (q, k, v), dout)
    with torch.no_grad():
        name, op = "_scaled_dot_product_flash_attention", door._Op(FORWARD, None)
        out, lse, _, _, rows, keys, seed, offset, _ = door._run(
            name, op, None, q, k, v, 0.0, is_causal
        )
        assert (rows, keys, lse.shape) == (30, 30, (2, 4, 30))
        torch.testing.assert_close(out, wanted)
        name, op = f"{name}_backward", door._Op(BACKWARD, None)
        arguments = (dout, q, k, v, out, lse, None, None, 30, 30, 0.0, is_causal, seed, offset)
        torch.testing.assert_close(door._run(name, op, None, *arguments), grads)


def test_nothing_is_active_before_and_after(forwards):
    """Importing activates nothing, and restoring takes everything back."""
    assert "MAGI" in list_flash_attention_impls()
    tensors, lists = packed(40, 40), starts((40,))
    for _ in range(2):
        assert current_flash_attention_impl() is None
        with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
            varlen_attn(*tensors, lists, lists, 40, 40, **GQA)
        activate_flash_attention_impl("MAGI")
        assert current_flash_attention_impl() == "MAGI"
        varlen_attn(*tensors, lists, lists, 40, 40, **GQA)
        restore_flash_attention_impl()
    assert len(forwards) == 2


# On a GPU


GPU = {"device": "cuda", "dtype": torch.bfloat16}
CLOSE = {"atol": 3e-2, "rtol": 3e-2}


def kernels_of(call):
    """The names of the CUDA kernels that `call` launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [event.key for event in seen.key_averages()]


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_varlen_on_a_gpu(case, head_dim, active):
    lengths_q, lengths_k, window = case
    tensors = packed(sum(lengths_q), sum(lengths_k), head_dim=head_dim, **GPU)
    tensors = [x.detach().requires_grad_() for x in tensors]
    lists = (starts(lengths_q, "cuda"), starts(lengths_k, "cuda"), max(lengths_q), max(lengths_k))
    out = varlen_attn(*tensors, *lists, window_size=window, **GQA)
    check(tensors, out, dense(tensors, lengths_q, lengths_k, window), **CLOSE)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sdpa_on_a_gpu(head_dim, is_causal, active):
    tensors = [torch.randn(2, 4, 300, head_dim, **GPU, requires_grad=True) for _ in range(3)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=is_causal)
    torch.testing.assert_close(out, wanted.to(out.dtype), **CLOSE)
    theirs = [x.to(out.dtype) for x in gradients(wanted, exact)]
    torch.testing.assert_close(gradients(out, tensors), tuple(theirs), **CLOSE)


@pytest.mark.gpu
def test_it_is_our_kernel_on_a_gpu(active):
    q, k, v = (torch.randn(2, 4, 300, 128, **GPU) for _ in range(3))

    def attend():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    attend()
    names = " ".join(kernels_of(attend))
    assert "flash_fwd" not in names  # as PyTorch's own are called
    restore_flash_attention_impl()
    try:
        assert "flash_fwd" in " ".join(kernels_of(attend))
    finally:
        activate_flash_attention_impl("MAGI")


@pytest.mark.gpu
@pytest.mark.parametrize("door_of", ["varlen", "sdpa"])
def test_pytorch_takes_the_rest_on_a_gpu(door_of, active, caplog):
    """Dropout, and splits that are asked for: right numbers from PyTorch's kernels, and one warning."""
    q, k, v = (torch.randn(300, 4, 128, **GPU) for _ in range(3))
    lists = (starts((300,), "cuda"), starts((300,), "cuda"), 300, 300)
    for _ in range(2):
        if door_of == "varlen":
            if "seqused_k" not in PARAMETERS:
                pytest.skip("this PyTorch's varlen_attn takes no seqused_k")
            used = torch.tensor([200], dtype=torch.int32, device="cuda")
            out = varlen_attn(q, k, v, *lists, seqused_k=used)
            wanted = dense((q, k[:200], v[:200]), (300,), (200,))
            torch.testing.assert_close(out, wanted.to(out.dtype), **CLOSE)
        else:
            padded = [x.transpose(0, 1)[None] for x in (q, k, v)]
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(*padded, dropout_p=0.5)
            assert bool(out.isfinite().all())
    assert len([r for r in caplog.records if r.name == "magi_compile"]) == 1


@pytest.mark.gpu
def test_compiled_on_a_gpu(active):
    tensors = [x.detach().requires_grad_() for x in packed(640, 640, head_dim=128, **GPU)]

    @torch.compile(fullgraph=True)
    def attend(q, k, v, lists):
        return varlen_attn(q, k, v, lists, lists, 640, 640, window_size=(-1, 0), **GQA)

    for layout in ((300, 340), (100, 540)):
        out = attend(*tensors, starts(layout, "cuda"))
        check(tensors, out, dense(tensors, layout, layout, (-1, 0)), **CLOSE)
