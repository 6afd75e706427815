"""`explain`: what would become of every attention of a model, on given inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule

from magi_compile.lowering import regions
from magi_compile.lowering.across_ranks import ACROSS_RANKS
from magi_compile.lowering.flex import LoweredCall, lower_flex_attention
from magi_compile.lowering.flex_call import graphs
from magi_compile.lowering.options import DEFAULTS
from magi_compile.lowering.report import Decision, LoweringReport
from magi_compile.masks import AttnSlices, MaskType
from magi_compile.masks.bits import FIRST_BITS
from magi_compile.masks.evaluation.block_lists import BlockLists
from magi_compile.masks.evaluation.block_table import BlockTable
from magi_compile.ops.arguments import AttentionOptions


@dataclass(frozen=True)
class AttentionCall:
    """One attention as it ran: what was decided when it was compiled, and the slices, block lists or block table of its
    mask."""

    decision: Decision
    slices: AttnSlices | None
    block_lists: BlockLists | None = None
    block_table: BlockTable | None = None

    @property
    def density(self) -> float:
        """The visible share of the score matrices of all batch entries; of block lists, that of blocks, and of a block
        table, what it shows."""
        if self.block_table is not None:
            return self.block_table.density()
        if self.block_lists is not None:
            num_q, num_k = self.block_lists.kv_indices.shape[-2:]
            is_partial, is_full = self.block_lists.grids(num_q, num_k)
            return float((is_partial | is_full).double().mean())
        if self.slices is None:
            raise ValueError(
                "`density` needs slices, and this attention has none: it stays on FlexAttention"
            )
        pairs = self.slices.seqlen_q * int(self.decision.k_shape[2])
        return self.slices.area() / max(1, pairs)

    def __str__(self) -> str:
        decision = self.decision
        lines = [f"{decision.shape}" + (f"  ({decision.location})" if decision.location else "")]
        if decision.mask:
            lines.append(f"mask     {decision.mask}")
        if decision.score:
            lines.append(f"score    {decision.score}")
        if self.slices is not None:
            types = self.slices.mask_types.tolist()
            kinds = [f"{types.count(t)} {t.name}" for t in MaskType if t in types]
            num_bits = sum(t >= FIRST_BITS for t in types)
            kinds += [f"{num_bits} blocks of bits"] if num_bits else []
            text = ", ".join(kinds)
            lines.append(f"slices   {len(types)} ({text})" if types else "slices   0")
            lines.append(f"area     {self.slices.area():,} pairs, density {self.density:.4f}")
        if self.block_lists is not None:
            _, heads, num_q, num_k = self.block_lists.kv_indices.shape
            blocks = f"{num_q} x {num_k} blocks for each of {heads} heads"
            lines.append(f"lists    {blocks}, density {self.density:.4f}")
        if self.block_table is not None:
            _, heads, num_q, num_k = self.block_table.listed.shape
            blocks = f"{num_q} x {num_k} blocks for each of {heads} heads"
            lines.append(f"table    {blocks}, density {self.density:.4f}")
        if decision.kernel:
            lines.append(f"kernel   {decision.kernel}")
            lines.extend(f"         {note}" for note in decision.notes)
            for why, kernels in groupby(decision.passed_over, key=itemgetter(1)):
                names = ", ".join(name for name, _ in kernels)
                lines.append(f"         not {names}: {'; '.join(why)}")
        else:
            lines.append("kernel   none of ours; the call stays on FlexAttention because")
            lines.extend(f"         - {reason}" for reason in decision.reasons)
        return "\n".join(lines)


@dataclass
class Explanation:
    """Every attention of one run, in order.

    Attributes:
        calls: those of FlexAttention.
        report: what was lowered.
        num_across_ranks: attentions inside of `context_parallel`, whose plan explains itself.
        failure: the error that ended the run, behind what was decided until then.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    report: LoweringReport = field(default_factory=LoweringReport)
    num_across_ranks: int = 0
    failure: Exception | None = None

    def __str__(self) -> str:
        """The calls, those that read the same in a row as one."""
        blocks = []
        for text, group in groupby(enumerate(self.calls), key=lambda item: str(item[1])):
            numbers = [number for number, _ in group]
            label = f"[{numbers[0]}]" if len(numbers) == 1 else f"[{numbers[0]}-{numbers[-1]}]"
            blocks.append(f"{label} " + text.replace("\n", "\n    "))
        if self.num_across_ranks:
            blocks.append(
                f"{self.num_across_ranks} attentions run across ranks: SequencePlan.explain() shows "
                "mask, balance and communication"
            )
            scores = [
                x.score for x in self.report.decisions if x.kernel == ACROSS_RANKS and x.score
            ]
            blocks += [f"across ranks with score {score}" for score in dict.fromkeys(scores)]
        if self.failure is not None:
            why = getattr(self.failure, "inner_exception", self.failure)  # in PyTorch's wrapping
            first = str(why).strip().partition("\n")[0]
            blocks.append(f"the run itself failed: {type(why).__name__}: {first}")
        return "\n".join([*blocks, str(self.report)])


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Runs `fn(*args, **kwargs)` once and explains what backend="magi" does with every attention in it.

    The run computes no gradients and compiles no code. Attentions that stay on FlexAttention run eagerly, which takes
    memory for the whole score matrix.

    Args:
        fn: a model or a function that calls FlexAttention.
        *args: its arguments, which also decide the masks.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`: print it, or read its `calls`. If `fn` raises behind a decision, its error is the `failure`,
        and attentions that did not run have no slices.

    Raises:
        TypeError: `fn` is not callable.
        Exception: what `fn` raises before anything was decided.
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be a model or a function, got {type(fn).__name__}")
    regions.watch()
    explanation = Explanation()

    def backend(gm: GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        calls = lower_flex_attention(gm, DEFAULTS, explanation.report)
        nodes = [node for graph in graphs(gm) for node in graph.graph.nodes]
        names = [getattr(node.target, "__name__", "") for node in nodes]
        explanation.num_across_ranks += sum(name.startswith("cp_attention") for name in names)
        for call in calls:
            call.node.target = _recording(call, explanation)
            if call.mask is not None:
                call.node.update_arg(_SLICES, list(call.mask.ranges))
            call.node.args = (*call.node.args, *call.block_lists, *call.block_table)
        for module in gm.modules():
            if isinstance(module, GraphModule):
                module.recompile()
        return gm.forward

    backend.lowering_options = lambda _: DEFAULTS  # type: ignore[attr-defined]
    try:
        with torch.no_grad():
            torch.compile(fn, backend=backend, dynamic=False)(*args, **kwargs)
    except Exception as error:
        if not explanation.report.decisions:
            raise
        explanation.failure = error
        ran = {id(call.decision) for call in explanation.calls}
        decided = (x for x in explanation.report.decisions if id(x) not in ran)
        explanation.calls += [AttentionCall(decision, None) for decision in decided]
    return explanation


_SLICES = 3  # among the arguments of the op: behind q, k and v


def _recording(call: LoweredCall, explanation: Explanation) -> Callable[..., Any]:
    """The target of the call's node, which also writes the call down."""
    target: Any = call.node.target

    def attention(*args: Any) -> Any:
        slices, listed, table = None, None, None
        if call.decision.kernel and call.block_table:
            table = BlockTable(*args[-len(call.block_table) :])
            args = args[: -len(call.block_table)]
        if call.decision.kernel and call.block_lists:
            listed = BlockLists(*args[-len(call.block_lists) :])
            args = args[: -len(call.block_lists)]
        if call.decision.kernel:
            (q, k, _), options = args[:_SLICES], AttentionOptions(*args[_SLICES:])
        if call.decision.kernel and options.slices:
            q_ranges, k_ranges, mask_types = options.slices
            lists = (q_ranges, k_ranges, mask_types, q.shape[0], k.shape[0])
            slices = AttnSlices.unchecked(*lists, options.bits).compact()
        explanation.calls.append(AttentionCall(call.decision, slices, listed, table))
        return target(*args)

    return attention
