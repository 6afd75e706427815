"""The score_mods that every kernel runs: none, a scale, a soft-cap, and their compositions.
Others are score programs (`score/`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from magi_compile.score.program import UnsupportedScoreModError

MAX_FACTOR = 1e15  # of a score; beyond, products of scores and factors may not be finite


@dataclass(frozen=True)
class ScoreMod:
    """`score -> scale * score`, or, with a soft-cap, `score -> softcap * tanh(scale * score / softcap)`."""

    scale: float = 1.0
    softcap: float = 0.0


class _Score:
    """The value of a score_mod so far: `outer * tanh(inner * score)` with tanh, else `outer * score`."""

    def __init__(self, outer: float = 1.0, inner: float | None = None):
        self.outer, self.inner = outer, inner

    def _times(self, factor: Any) -> _Score:
        if isinstance(factor, _Unused):
            factor._refuse()
        if isinstance(factor, torch.Tensor) and factor.ndim == 0 and factor.device.type == "cpu":
            if factor.requires_grad:
                raise UnsupportedScoreModError(
                    "score_mod multiplies the score by a tensor that requires a gradient; multiply q by it instead"
                )
            factor = factor.item()
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise UnsupportedScoreModError(
                f"score_mod multiplies the score by {type(factor).__name__}; only constants can be folded"
            )
        outer = self.outer * factor
        if not abs(outer) <= MAX_FACTOR or not abs(factor) <= MAX_FACTOR:
            raise UnsupportedScoreModError(
                f"score_mod multiplies the score by {factor}, which may overflow in fp32"
            )
        return _Score(outer, self.inner)

    def __mul__(self, other: Any) -> _Score:
        return self._times(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> _Score:
        if not isinstance(other, (int, float)) or other == 0:
            raise UnsupportedScoreModError(
                "score_mod divides the score by something other than a constant"
            )
        return self._times(1.0 / other)

    def __neg__(self) -> _Score:
        return self._times(-1.0)

    def tanh(self) -> _Score:
        if self.inner is not None:
            raise UnsupportedScoreModError("score_mod applies tanh twice")
        return _Score(1.0, self.outer)

    mul = multiply = __mul__
    div = true_divide = divide = __truediv__
    neg = __neg__

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedScoreModError(f"score_mod applies `{name}` to the score")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func)).split(".")[0].strip("_")  # aten's "div.Tensor"
        method = {"mul": "mul", "multiply": "mul", "rmul": "mul", "tanh": "tanh", "neg": "neg"}.get(
            name
        )
        if name in ("truediv", "div", "divide", "true_divide"):
            method = "div"
        if method is None or kwargs:
            raise UnsupportedScoreModError(f"score_mod applies `{name}` to the score")
        first, *rest = args
        if not isinstance(first, _Score):
            if method != "mul":
                raise UnsupportedScoreModError("score_mod divides by the score")
            first, rest = rest[0], [first]
        return getattr(first, method)(*rest)


def _refuse_operator(name: str) -> Callable[..., Any]:
    def refuse(self: _Score, *_: Any) -> Any:
        raise UnsupportedScoreModError(f"score_mod applies `{name}` to the score")

    return refuse


for _name in ("add", "sub", "pow", "floordiv", "mod", "matmul"):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(_Score, _form, _refuse_operator(_name))
for _name in ("rtruediv", "lt", "le", "gt", "ge", "abs", "bool", "float", "invert", "getitem"):
    setattr(_Score, f"__{_name}__", _refuse_operator(_name))


class _Unused:
    """Stands for an index or a captured buffer: any use of it is a reason to refuse."""

    def __init__(self, what: str):
        self._what = what

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedScoreModError(f"score_mod depends on {self._what}")

    def __add__(self, other: Any) -> _Unused:
        """An index of a shard as one of the whole tensor: as long as nobody uses it, that may be."""
        return self if isinstance(other, int) else self._refuse()

    __radd__ = __add__

    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __neg__ = __index__ = (
        _refuse
    )
    __floordiv__ = __mod__ = __pow__ = __bool__ = __invert__ = _refuse

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            if isinstance(arg, _Unused):
                arg._refuse()
        raise UnsupportedScoreModError(f"score_mod applies `{func}` to an index or a buffer")


def trace_score_mod(score_mod: Callable[..., Any] | None, num_buffers: int = 0) -> ScoreMod:
    """Reads `score_mod`, `f(score, b, h, q_idx, kv_idx, *buffers)`, as a scale and a soft-cap: a function, or an FX
    GraphModule that takes `num_buffers` captured buffers after the indices, or None. Raises UnsupportedScoreModError if
    it is anything else; the message says what it does."""
    if score_mod is None:
        return ScoreMod()
    if not callable(score_mod):
        raise TypeError(f"`score_mod` must be a function or None, got {score_mod!r}")
    indices = [_Unused(f"the {name} index") for name in ("batch", "head", "query", "key")]
    buffers = [_Unused(f"captured buffer {i}") for i in range(num_buffers)]
    try:
        result = score_mod(_Score(), *indices, *buffers)
    except UnsupportedScoreModError:
        raise
    except Exception as error:
        raise UnsupportedScoreModError(f"score_mod could not be traced: {error}") from error
    if isinstance(score_mod, torch.fx.GraphModule) and isinstance(result, (tuple, list)):
        (result,) = result
    if not isinstance(result, _Score):
        raise UnsupportedScoreModError(f"score_mod returns {type(result).__name__}, not a score")
    if result.inner is None:
        return ScoreMod(scale=result.outer)
    # outer * tanh(inner * s) is a soft-cap at `outer` of the scores times inner * outer.
    if result.outer == 0:
        return ScoreMod(scale=0.0)
    return ScoreMod(scale=result.inner * result.outer, softcap=abs(result.outer))
