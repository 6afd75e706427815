"""A process that calls a compiled FlexAttention for the first time: forward, backward, and both again. It imports
magi_compile only for ours, and all else when its time is taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from magi_bench.process import serve

DOCUMENTS = 8


def answer(request: dict[str, Any]) -> tuple[dict[str, float], bool]:
    """The seconds of each step, see `measure`; and that the process is spent."""
    return measure(**request), True


def measure(
    contender: str,
    case: str,
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    device: str,
    *,
    imports: bool,
) -> dict[str, float]:
    """Takes the seconds of everything up to the second step, by the names of steps. On a CPU FlexAttention has no
    backward. With `imports`, Dynamo and Inductor are imported before the first call."""
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        if device == "cuda":
            import torch

            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - start
        return result

    timed("torch and context", lambda: _start(device, imports=imports))
    import torch
    from torch.nn.attention import flex_attention as flex

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        is_causal = q >= kv
        return is_causal & (document[q] == document[kv]) if case == "documents" else is_causal

    def alibi(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + slopes[h] * (kv - q)

    document = torch.arange(tokens, device=device) * DOCUMENTS // tokens
    slopes = torch.exp2(-torch.arange(1, heads[0] + 1, device=device) * 8.0 / heads[0])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, n, tokens, head_dim, device=device, dtype=dtype)
        for n in (heads[0], heads[1], heads[1])
    )
    has_backward = device == "cuda" or contender == "magi"
    leaves = [x.requires_grad_(has_backward) for x in (q, k, v)]
    block_mask = timed(
        "BlockMask",
        lambda: flex.create_block_mask(mask_mod, None, None, tokens, tokens, device=device),
    )
    if contender == "magi":
        timed("import magi_compile", lambda: __import__("magi_compile"))
    backend = "magi" if contender == "magi" else "inductor"
    compiled = torch.compile(flex.flex_attention, backend=backend)
    score_mod = alibi if case == "alibi" else None
    for prefix in ("", "second "):
        out = timed(
            f"{prefix}forward",
            lambda: compiled(q, k, v, score_mod, block_mask, enable_gqa=heads[0] != heads[1]),
        )
        if has_backward:
            backward = partial(torch.autograd.grad, out, leaves, torch.ones_like(out))
            timed(f"{prefix}backward", backward)
    return seconds


def _start(device: str, *, imports: bool) -> None:
    import torch

    torch.zeros(1, device=device)
    if imports:
        import torch._dynamo
        import torch._inductor.compile_fx


if __name__ == "__main__":
    serve(lambda: answer)
