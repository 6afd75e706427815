"""The regions of compiled code whose FlexAttention we lower: PyTorch's FlexAttention asks here.

While Dynamo traces for us, FlexAttention takes CPU tensors that need gradients, which the lowering makes good; for
everybody else it refuses them, as it does without us. And where attention of a compiled function runs eagerly, with the
whole score matrix, that is said, since no graph and so no report has it.
"""

from __future__ import annotations

import re
import traceback
from typing import Any

import torch

from magi_compile import _compat
from magi_compile.lowering.options import LoweringOptions
from magi_compile.lowering.report import REPORT, LoweringRefusedError

MAX_BREAKS = 3  # in a message


def watch() -> None:
    """Has FlexAttention ask here from now on."""
    _compat.watch_flex_attention(_allows_cpu_training, notice_eager_attention)


def options_for(backend: Any) -> LoweringOptions | None:
    """The options under which FlexAttention in graphs for `backend` is lowered, or None where it is not.

    That is so for our backends, and under `enable()` for every backend, since many end in Inductor.
    """
    layers, options = _compat.layers_of(backend)
    for layer in layers:
        if hasattr(layer, "lowering_options"):
            return layer.lowering_options(options)
    installed = _compat.installed_pre_grad_pass()
    return installed.options if _compat.is_pre_grad_pass_of_ours(installed) else None


def lowers_what_is_traced() -> bool:
    """True if FlexAttention will be lowered in the graph that Dynamo makes now; of torch.export's nobody knows yet what
    compiles them. For functions that Dynamo calls while it traces (`torch.compiler.assume_constant_result`)."""
    if torch.compiler.is_exporting():
        return True
    return options_for(_compat.backend_that_dynamo_traces_for()) is not None


def _allows_cpu_training(backend: Any) -> bool:
    if backend is None and not torch.compiler.is_exporting():
        return False
    return options_for(backend) is not None


def notice_eager_attention() -> str:
    """Tells of attention that runs eagerly inside of a compiled function: the first time for a place as a warning.

    Noticed is FlexAttention at which a graph breaks (a mask_mod that prints or branches on data), which is called from
    code that is excluded from compilation (`torch.compiler.disable`), or for which Dynamo has given up (the recompile
    limit). Not noticed is attention that another torch.compile inside of the compiled function takes, or that runs
    while compilation is off (`TORCHDYNAMO_DISABLE`, `set_stance("force_eager")`), and attention that is not
    FlexAttention.

    Returns:
        What it says; an empty text of attention that is not noticed.

    Raises:
        LoweringRefusedError: the compiled function is `strict`.
    """
    found = (options_for(backend) for backend in _compat.backends_around())
    options = next((options for options in found if options is not None), None)
    if options is None:
        return ""
    own = notice_eager_attention.__name__  # Dynamo does not trace it, and says so
    breaks = [reason for reason in _compat.graph_breaks() if own not in reason][:MAX_BREAKS]
    message = (
        f"FlexAttention at {_caller()} runs eagerly and computes the whole score matrix, although "
        "the function around it is compiled: "
        "the graph breaks there, in the mask_mod or the score_mod, or the code is excluded from compilation, Dynamo "
        "reached its recompile limit, or it leaves the function uncompiled, as under a dispatch "
        "mode (FlopCounterMode) and, until torch.compiler.reset(), after an error in this or an earlier call, as where "
        "block_mask has other lengths than q and k. "
        + (f"Graph breaks so far: {'; '.join(breaks)}. " if breaks else "")
        + "A mask_mod must not print or branch on data. torch.compile with `fullgraph=True` raises "
        "where a graph breaks; TORCH_LOGS=graph_breaks,recompiles lists all places and reasons"
    )
    if options.strict:
        raise LoweringRefusedError(message)
    REPORT.warn_once(_caller(), message)
    return message


def _caller() -> str:
    """The innermost line that is neither PyTorch's nor ours."""
    aside = re.compile(r"[/\\]torch[/\\]|[/\\]magi_compile[/\\](?!.*tests)|^<")
    frames = [frame for frame in traceback.extract_stack() if not aside.search(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "?"
