"""What users write around a compiled model, one function for each: `python -m tests.programs.programs DOOR PROGRAM...`.

DOOR is how attention reaches our kernels: "magi", the backend, "enable", stock Inductor with our pass, or "quick", the
backend in front of a compiler that is quick on a CPU. Prints a line `PROGRAM: ok` or `PROGRAM: what went wrong` for
each.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import magi_compile
from magi_compile.lowering.report import REPORT
from tests.programs.model import (
    RUNS,
    Model,
    assert_near,
    backend_of,
    batch,
    check_gradients,
    check_inference,
    check_lowered,
    check_training,
    count_runs,
    dense_attend,
    dense_causal_documents,
    distance,
    gradients_of,
    make_model,
    num_graphs,
    outputs,
    reference,
    sgd,
)


class Door:
    def __init__(self, name: str):
        self.name, self.backend = name, backend_of(name)

    def compile(self, what: Any, **options: Any) -> Any:
        return torch.compile(what, backend=self.backend, **options)


def plain(door: Door) -> None:
    model = make_model()
    check_training(door.compile(model, fullgraph=True), model)


def module_compile(door: Door) -> None:
    model = make_model()
    model.compile(backend=door.backend)
    check_training(model, model)


def only_attention(door: Door) -> None:
    model = make_model()
    compiled = door.compile(flex_attention)
    for block in model.blocks:
        block.attend = lambda q, k, v, mask: compiled(q, k, v, block_mask=mask, enable_gqa=True)
    check_training(model, model)


# Activation checkpointing


def around_blocks(door: Door, use_reentrant: bool) -> None:
    """Compiled blocks in an eager model that checkpoints them."""
    model = make_model(partial(checkpoint, use_reentrant=use_reentrant))
    for block in model.blocks:
        block.compile(backend=door.backend)

    def run(x: Tensor, document: Tensor) -> Tensor:
        # Reentrant checkpoints have gradients only where an input wants one.
        return model(x.requires_grad_(), document)

    check_training(run, model)


def reentrant_around_blocks(door: Door) -> None:
    around_blocks(door, True)


def non_reentrant_around_blocks(door: Door) -> None:
    around_blocks(door, False)


def reentrant_inside(door: Door) -> None:
    """A compiled model that checkpoints its blocks; Dynamo leaves reentrant checkpoints to eager code."""
    model = make_model(partial(checkpoint, use_reentrant=True))
    compiled = door.compile(model)
    check_training(lambda x, document: compiled(x.requires_grad_(), document), model)


def non_reentrant_inside(door: Door) -> None:
    model = make_model(partial(checkpoint, use_reentrant=False))
    check_training(door.compile(model, fullgraph=True), model)


def saves_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.magi.ffa_fwd.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(
    checkpoint,
    use_reentrant=False,
    context_fn=partial(create_selective_checkpoint_contexts, saves_attention),
)


def selective_inside(door: Door) -> None:
    model = make_model(SELECTIVE)
    check_training(door.compile(model, fullgraph=True), model)


def selective_around_blocks(door: Door) -> None:
    model = make_model(SELECTIVE)
    for block in model.blocks:
        block.compile(backend=door.backend)
    check_training(model, model)


def selective_policy_first(door: Door) -> None:
    """A policy that names the op before anything is compiled."""
    import magi_compile.ops  # noqa: F401

    attention = torch.ops.magi.ffa_fwd.default
    context_fn = partial(create_selective_checkpoint_contexts, [attention])
    model = make_model(partial(checkpoint, use_reentrant=False, context_fn=context_fn))
    check_training(door.compile(model, fullgraph=True), model)


# Export


def export(door: Door) -> None:
    """The exported program, run as it is; a graph with a mask that is made in it cannot be traced by Dynamo again."""
    model = make_model()
    x, document, _ = batch(1)
    with torch.no_grad():
        program = torch.export.export(model, (x, document)).module()
        for step in range(3):
            x, document, _ = batch(step)
            assert_near(program(x, document), outputs(model, step), 1e-4, f"step {step}")


def aot_inductor(door: Door) -> None:
    model = make_model()
    x, document, _ = batch(1)
    with torch.no_grad():
        program = torch.export.export(model, (x, document))
        package = torch._inductor.aoti_compile_and_package(program)
        check_inference(torch._inductor.aoti_load_package(package), model)


# Training loops


def autocast(door: Door) -> None:
    """As near as dense attention under autocast."""
    model = make_model()
    dense = Model(dense_attend, dense_causal_documents)
    dense.load_state_dict(model.state_dict())
    compiled = door.compile(model, fullgraph=True)
    for step in range(4):
        (expected,), grads = reference(model.state_dict(), [step])
        results = []
        for run, parameters in ((compiled, model), (dense, dense)):
            x, document, weights = batch(step)
            parameters.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = run(x, document)
            (out.float() * weights).sum().backward()
            results.append({"the output": out, **gradients_of(parameters)})
        ours, theirs = results
        for name, exact in {"the output": expected, **grads}.items():
            allowed = 2 * distance(theirs[name], exact) + 1e-3
            assert_near(ours[name], exact, allowed, f"{name}, step {step}")
    check_lowered()


def reduce_overhead(door: Door) -> None:
    model = make_model()
    check_training(door.compile(model, mode="reduce-overhead"), model)


def cuda_graphs(door: Door) -> None:
    model = make_model(device="cuda")
    compiled = door.compile(model, mode="reduce-overhead")

    def run(x: Tensor, document: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(x, document)

    torch.set_float32_matmul_precision("highest")
    check_training(run, model, steps=range(8), tolerance=4e-3, device="cuda")


def accumulation(door: Door) -> None:
    """Gradients of four layouts added up; then again after a step."""
    model = make_model()
    compiled = door.compile(model)
    for _ in range(2):
        outs, grads = reference(model.state_dict(), range(4))
        model.zero_grad()
        for step, expected in enumerate(outs):
            x, document, weights = batch(step)
            out = compiled(x, document)
            assert_near(out, expected, 1e-4, f"the output of step {step}")
            (out * weights).sum().backward()
        check_gradients(model, grads, 1e-4)
        sgd(model)
    check_lowered()


def several_forwards(door: Door) -> None:
    """Before one backward."""
    model = make_model()
    compiled = door.compile(model)
    _, grads = reference(model.state_dict(), range(4))
    losses = [(compiled(*batch(step)[:2]) * batch(step)[2]).sum() for step in range(4)]
    sum(losses).backward()
    check_gradients(model, grads, 1e-4)
    check_lowered()


def evaluation(door: Door) -> None:
    """Evaluation between training steps, under either way to have no gradients; each compiles once."""
    model = make_model()
    compiled = door.compile(model)
    graphs = []
    for turn in range(3):
        model.train()
        check_training(compiled, model, steps=[turn])
        sgd(model)
        model.eval()
        for no_gradients in (torch.no_grad, torch.inference_mode):
            with no_gradients():
                check_inference(compiled, model, steps=[turn, turn + 1])
        graphs.append(num_graphs())
    assert graphs[0] == graphs[2], f"compiled again: {graphs}"


def inference_first(door: Door) -> None:
    """What is made in `inference_mode` must serve training too."""
    model = make_model()
    compiled = door.compile(model)
    with torch.inference_mode():
        check_inference(compiled, model)
    check_training(compiled, model)


def copies(door: Door) -> None:
    """A model that was compiled is copied and pickled; the copies train."""
    model = make_model()
    model.compile(backend=door.backend)
    check_training(model, model, steps=[0])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.compile(backend=door.backend)
        check_training(copied, copied, steps=[2])


def copy_of_an_optimized_module(door: Door) -> None:
    model = make_model()
    compiled = door.compile(model)
    check_training(compiled, model, steps=[0])
    copied = copy.deepcopy(compiled)
    check_training(copied, copied, make_model().state_dict(), steps=[1])


def threads(door: Door) -> None:
    """Two threads, each with a compiled model of its own, at the same time."""
    errors: list[str] = []
    # Compiled at their first step. torch.compile itself must not look up a backend by name in two threads at once.
    models = [make_model() for _ in range(2)]
    compiled = [door.compile(model) for model in models]

    def train(seed: int) -> None:
        steps = range(seed, seed + 4)
        try:
            check_training(compiled[seed], models[seed], steps=steps, recompiles=True)
        except Exception:
            errors.append(traceback.format_exc())

    started = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not errors, "\n".join(errors)


# Several processes


def fsdp2(door: Door) -> None:
    from tests.programs.processes import run_fsdp2, spawn

    spawn(run_fsdp2, door.name)


def ddp(door: Door) -> None:
    from tests.programs.processes import run_ddp, spawn

    spawn(run_ddp, door.name)


def programs() -> dict[str, Callable[[Door], None]]:
    chosen = {}
    for name, value in globals().items():
        is_ours = isinstance(value, type(programs)) and value.__module__ == __name__
        if is_ours and list(value.__annotations__) == ["door", "return"]:
            chosen[name] = value
    return chosen


def main(door: str, *names: str) -> None:
    if door == "enable":
        magi_compile.enable()
    count_runs()
    for name in names:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        REPORT.clear()
        RUNS.clear()
        try:
            programs()[name](Door(door))
        except Exception:
            print(f"{name}: {traceback.format_exc()}".replace("\n", "\x1f"), flush=True)
        else:
            print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
