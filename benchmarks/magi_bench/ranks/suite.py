"""`magi-bench ranks`: attention across ranks, or training steps, in processes that are started here or by torchrun.

Who takes part: ours, PyTorch's own context parallelism, the strategies of the field, and a rank that has nobody beside
it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from magi_bench import arguments, runner, world
from magi_bench.arguments import Settings
from magi_bench.cases import Case
from magi_bench.clock import Ready, Rounds
from magi_bench.contenders.base import Attend, Contender
from magi_bench.contenders.flex import BLOCK, make_block_mask, no_backward
from magi_bench.ranks import base, model
from magi_bench.ranks.base import Problem
from magi_bench.ranks.strategies import placement
from magi_bench.ranks.strategies.contenders import (
    STRATEGIES,
    Mesh,
    OneRank,
    OneRankFlex,
    UlyssesFlex,
    Usp,
    heads_of,
)
from magi_bench.ranks.strategies.varlen import LOCAL_KERNELS
from magi_bench.results.rows import Row
from magi_bench.workloads.lengths import SAMPLERS
from magi_bench.world import World
from magi_compile import _compat
from magi_compile.dtensor import (
    ContextParallelOptions,
    SequencePlan,
    context_parallel_attention,
    plan,
)
from magi_compile.dtensor.planning.rank_plan import PlanTensors


class Magi(base.RanksContender):
    name = "magi"
    label = "magi_compile.dtensor.plan"
    is_ours = True
    options = ContextParallelOptions()

    def prepare(self, problem: Problem, case: Case) -> Ready:
        ready = super().prepare(problem, case)
        if not problem.settings.exposed:
            return ready
        return ready._replace(without_moves=self.without_moves(problem, case))

    def without_moves(self, problem: Problem, case: Case) -> Callable[[], Sequence[Tensor]]:
        """The kernel alone: this rank's queries over the keys that they see, all of which are there beforehand."""
        return self.kernel_alone(problem, case, self._positions)

    def kernel_alone(
        self, problem: Problem, case: Case, rows: Tensor, share: int = 1
    ) -> Callable[[], Sequence[Tensor]]:
        """A call of the kernel on queries at `rows` of the sequence, by a rank's share of the heads."""
        workload, world = problem.workload, problem.world
        mine = placement.runs_of(rows.sort().values)
        keys = placement.seen(workload.slices, mine)
        slices = placement.between(workload.slices, mine, keys)
        heads = heads_of(problem, share)
        attend = base.kernel_on(workload, world, heads, slices)
        queries, seen = (placement.positions(spans, world.device) for spans in (mine, keys))
        places = (queries, seen, seen, queries)
        numbers = (heads[0], heads[1], heads[1], heads[0])
        inputs = zip(problem.inputs, places, numbers, strict=True)
        return base.call_of(attend, [x[at, :number] for x, at, number in inputs], case)

    def spread(self, problem: Problem) -> base.Spread:
        made = plan(problem.workload.slices, problem.world.mesh, options=self.options)
        told = made.explain()
        received, sent = (x[problem.world.rank] for x in (told.received_rows, told.sent_rows))
        row = base.bytes_of_keys(problem)
        # Keys and values come again in a backward, and gradients of those that were sent come home.
        moved = (received * row, (received + sent) * row)
        return base.Spread(made.positions, self.attend_by(made), moved, "plan")

    def attend_by(self, made: SequencePlan) -> Attend:
        """Attention by a plan."""
        return made.attention


class MagiWaits(Magi):
    """Without the early start, which `magi` has: the difference is its gain."""

    name = "magi-waits"
    label = "the same, waiting for remote keys"
    is_ours = False
    options = ContextParallelOptions(degree=0, backward_degree=0, early=False)


class MagiOneStage(Magi):
    """With one stage of remote keys, of which `magi` may have more: the difference is their gain."""

    name = "magi-one-stage"
    label = "the same, local keys and then remote ones"
    is_ours = False
    options = ContextParallelOptions(degree=1, backward_degree=1)


class MagiAllToAll(Magi):
    """Over the collective of every process group, where `magi` takes what is fastest on its machine: the difference is
    its gain."""

    name = "magi-all-to-all"
    label = "the same, over all_to_all"
    is_ours = False

    def attend_by(self, made: SequencePlan) -> Attend:
        tensors = PlanTensors(made.meta, made.data)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # One layer below `SequencePlan.attention`, which has no such option.
            found = context_parallel_attention(
                *(q, k, v, tensors, made.group_name), collective="all_to_all"
            )
            return found.out

        return attend


class MagiHeads(Magi):
    """Over groups of consecutive ranks that share the heads of their group's tokens, where `magi` spreads tokens over
    all ranks. As many share heads as in USP."""

    name = "magi-heads"
    label = "the same, groups of ranks share heads"
    is_ours = False

    def mesh(self, problem: Problem) -> Mesh:
        settings = problem.settings
        return Usp.mesh_of(problem.world.size, settings.nheads_kv, settings.ulysses_degree)

    def supports(self, problem: Problem, case: Case) -> list[str]:
        mesh = self.mesh(problem)
        if mesh.ulysses * mesh.ring != problem.world.size or 1 in (mesh.ulysses, mesh.ring):
            has = f"{problem.world.size} ranks are {mesh.ring} of {mesh.ulysses}"
            return [f"needs two groups of two ranks that share heads, {has}"]
        return super().supports(problem, case)

    def without_moves(self, problem: Problem, case: Case) -> Callable[[], Sequence[Tensor]]:
        return self.kernel_alone(problem, case, self._of_group, self.mesh(problem).ulysses)

    def spread(self, problem: Problem) -> base.Spread:
        mesh, world, settings = self.mesh(problem), problem.world, problem.settings
        share, place = mesh.ulysses, world.rank // mesh.ulysses
        made = plan(
            problem.workload.slices,
            world.mesh,
            options=ContextParallelOptions(head_ranks=share),
        )
        self._of_group = made.of_groups.positions(place).to(world.device)
        told = made.explain()
        rows, sent = (x[place] for x in (told.received_rows, told.sent_rows))
        row = base.bytes_of_keys(problem)
        # Of q, k, v, out and log-sum-exps, from those with which it shares heads; of gradients as many.
        heads = settings.nheads_q, settings.nheads_kv
        whole = (row * sum(heads) // settings.nheads_kv + 4 * settings.nheads_q) * problem.tokens
        exchanged = whole * (share - 1) // share
        moved = (exchanged + rows * row // share, exchanged + (rows + sent) * row // share)
        return base.Spread(made.positions, made.attention, moved, "plan")


class TorchContextParallel(base.RanksContender):
    """FlexAttention over gathered keys and values, as PyTorch's style of context parallelism has it,
    in one compiled graph."""

    name = "torch"
    label = "PyTorch's context parallelism, FlexAttention"
    balancer = ""  # PyTorch's name of the one that places tokens; none leaves them in order

    def supports(self, problem: Problem, case: Case) -> list[str]:
        return no_backward(case, problem.world.kind)

    def spread(self, problem: Problem) -> base.Spread:
        world, block_mask = problem.world, make_block_mask(problem.workload, problem.world.device)
        balancer = self.load_balancer(problem, block_mask)
        positions = positions_by(balancer, problem)
        local = _compat.block_mask_of_torch_rank(world.mesh, block_mask, balancer)
        attend = base.flex_on(world, local, over_ranks=True)
        row, others = base.bytes_of_keys(problem), problem.total - problem.tokens
        # A reduce-scatter brings a rank as many rows as it has, from each of the others.
        return base.Spread(positions, attend, (others * row, others * row), "shapes")

    def load_balancer(self, problem: Problem, block_mask: BlockMask) -> Any:
        """PyTorch's load balancer, or None."""
        world = problem.world
        arguments: dict[str, tuple[Any, ...]] = {
            "HeadTail": (problem.total, world.size, world.kind),
            "PTRR": (block_mask, world.size),
            "PerDocumentHeadTail": ([problem.workload.documents], world.size, world.kind),
        }
        if not self.balancer:
            return None
        return _compat.load_balancer_of_torch(self.balancer, *arguments[self.balancer])


class HeadTail(TorchContextParallel):
    name = "torch-head-tail"
    label = "PyTorch's, head-tail balancer"
    balancer = "HeadTail"


class PerDocument(TorchContextParallel):
    name = "torch-documents"
    label = "PyTorch's, head-tail balancer of each document"
    balancer = "PerDocumentHeadTail"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        part, documents = 2 * problem.world.size, problem.workload.documents
        reasons, odd = super().supports(problem, case), [x for x in documents if x % part]
        if odd:
            text = f"takes documents of a multiple of {part} tokens, {len(odd)} of {len(documents)} are not"
            reasons.append(text)
        return reasons


class RoundRobin(TorchContextParallel):
    name = "torch-ptrr"
    label = "PyTorch's, round-robin balancer"
    balancer = "PTRR"

    def supports(self, problem: Problem, case: Case) -> list[str]:
        reasons, rows = super().supports(problem, case), problem.total // BLOCK
        if rows % problem.world.size:
            reasons.append(f"takes blocks of {BLOCK} rows that ranks divide, got {rows}")
        return reasons


#: In the order in which they run and of reports: those that compile for long come last.
CONTENDERS: tuple[type[base.RanksContender], ...] = (
    *(Magi, MagiAllToAll, MagiHeads, MagiWaits, MagiOneStage, OneRank),
    *STRATEGIES,
    *(OneRankFlex, UlyssesFlex, HeadTail, RoundRobin, PerDocument, TorchContextParallel),
)


def positions_by(balancer: Any, problem: Problem) -> Tensor:
    """The tokens of this rank: its part of the permutation of one of PyTorch's load balancers,
    or of the sequence."""
    world = problem.world
    order = torch.arange(problem.total, device=world.device)
    if balancer is not None:
        order = _compat.indices_of_load_balancer(balancer)[0].to(world.device)
    return order[world.rank * problem.tokens :][: problem.tokens]


ALL_MASKS = (
    *("document_causal", "causal", "sliding_window_causal", "block_causal_document"),
    "prefix_lm_causal",
)
#: Masks that do not know documents.
ONE_SEQUENCE = (
    *("full", "causal", "sliding_window", "sliding_window_causal", "global_sliding_window"),
    "prefix_lm_causal",
)
#: What options are where neither the command line nor a preset says otherwise.
DEFAULTS: dict[str, Any] = {
    "tokens": [8192],
    "masks": list(ALL_MASKS[:2]),
    "heads": "32:8",
    "samplers": ["seeds"],
    "packs": 1,
    "seconds": 150.0,
    "contenders": None,
    "exposed": False,
    "turn_ms": Rounds.turn_ms,
}
#: The same with --model, also in place of a preset's. A turn has several steps, of which only the last is waited for,
#: as in a training loop that does not print the loss of every step.
OF_STEPS: dict[str, Any] = {"masks": [next(iter(model.MASKS))], "turn_ms": 600.0}
#: The workloads of others, by name.
PRESETS: dict[str, dict[str, Any]] = {
    "seeds": {
        "tokens": [8192, 16384, 32768],
        "masks": ["full", "causal", "document_full", "document_causal"],
        "heads": "64:8",
        "samplers": ["seeds", "longca-long"],
        "packs": 3,
        "seconds": 1500.0,
        "exposed": True,
        "contenders": [
            *(
                "magi",
                "magi-all-to-all",
                "magi-heads",
                "one-rank",
                *(x.name for x in STRATEGIES),
                "one-rank-flex",
            ),
            *("torch-head-tail", "torch-ptrr", "torch-documents"),
        ],
    }
}
QUICK = {"tokens": [256], "heads": "4:2", "head_dim": 32, "rounds": 2, "turn_ms": 2.0, "vocab": 256}
QUICK["train_layers"] = 2
DESCRIPTION = """Attention across ranks, host included: ours, PyTorch's context parallelism, the strategies of the
field, one rank alone. Starts its own processes, or takes those that torchrun has started. Time goes into compilation: a
mask, a length and a pass cost FlexAttention's contenders a graph each (on two cores of a CPU 10 to 40 s, and on a GPU
seconds), the BlockMask of PyTorch's context parallelism another; ours and `one-rank` compile their CUDA kernels once.
--seconds begins nothing that would end later, judging by what a contender took before."""


class Ranks(runner.Suite):
    """One attention, or a model, over all ranks."""

    title = "Attention across ranks"
    notes = (
        "Times are of the slowest rank, host included: medians over rounds in which contenders take turns. Ratios are "
        "to ours, above 1 where ours is faster. TFLOP/s are of a rank, by the mean visible area of its queries. "
        "Received is what the rank that receives most gets from others in a call: of ours counted from the plan, of "
        "the others from shapes. Peak memory is what PyTorch's allocator holds in a call beyond the inputs; buffers "
        "of NCCL and symmetric memory are not in it. Exposed is the time less that of the same call without moves, of "
        "ours that of the kernel alone on all keys that its queries see. Documents of HybridCP are on their ranks "
        "before a call. A call of the model spreads a batch of new documents, and ours plans their mask in it or on a "
        "thread while the call before runs, while PyTorch's BlockMask is made before; with a backward it adds the "
        "gradients up over ranks."
    )
    has_peak = True
    world: World

    def cases(self) -> Iterator[Case]:
        more = {"ranks": self.world.size}
        if self.settings.model:
            more["layers"] = self.settings.train_layers
        for tokens in self.settings.tokens:
            for mask, settings in self.masks():
                if settings.model:
                    self._steps = model.Problem(settings, self.world, mask, tokens)
                else:
                    self._together = Problem(settings, self.world, mask, tokens)
                    self._alone = Problem(settings, self.world, mask, tokens, is_alone=True)
                for which in settings.passes:
                    yield settings.case("ranks", mask, tokens, which=which, **more)

    def masks(self) -> Iterator[tuple[str, Settings]]:
        """Each mask with the settings that draw it: once, or for each pack of documents of each sampler if it knows
        documents."""
        for mask in self.settings.masks:
            drawn = itertools.product(self.settings.samplers, range(self.settings.packs))
            for sampler, pack in drawn if self.knows_documents(mask) else [next(drawn)]:
                seed = self.settings.seed + pack
                yield mask, replace(self.settings, lengths=sampler, seed=seed)

    def knows_documents(self, mask: str) -> bool:
        """True if a mask of this name depends on the documents that are drawn."""
        return self.settings.model or mask not in ONE_SEQUENCE

    def contenders(self, case: Case) -> Sequence[Contender]:
        asked = self.settings.contenders
        if self.settings.model:
            wanted = [x for x in model.TRAININGS if asked is None or x.name in asked]
            return [x(self._steps) for x in wanted]
        return [
            made
            for x in CONTENDERS
            if asked is None or x.name in asked
            for made in x.around(self.settings.local_kernels)
        ]

    def problem(self, case: Case, contender: Contender) -> Problem | model.Problem:
        if self.settings.model:
            return self._steps
        return self._alone if contender.is_alone else self._together

    def place(self, case: Case) -> Row:
        words = ["model"] * self.settings.model + [case.mask.replace("_", " ")]
        if len(self.settings.samplers) > 1 and self.knows_documents(case.mask):
            words.append(f"of {case.lengths}")
        if case.seed != self.settings.seed:
            words.append(f"pack {case.seed - self.settings.seed + 1}")
        return {**super().place(case), "what": ", ".join(words)}

    def kind(self, case: Case) -> str:
        return case.level

    def rates(self, case: Case, contender: Contender, ms: float) -> Row:
        if self.settings.model:
            return {"tokens_per_s": case.seqlen * self.world.size / ms * 1e3}
        problem = self._alone if contender.is_alone else self._together
        return {"tflops": problem.flops(case.which) / ms / 1e9}

    def facts(self) -> Row:
        return {"ranks": self.world.size}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of the command."""
    parser.description = DESCRIPTION
    option, count = parser.add_argument, arguments.count
    words = "processes to start, by default one a GPU, or 2 on a CPU; not with torchrun"
    option("--ranks", type=count, help=words)
    option("--all-masks", action="store_true", help=f"{', '.join(ALL_MASKS)}")
    words = (
        "in place of attention alone, steps of a Llama of --layers on packed causal documents, of which "
        f"--masks has {' and '.join(model.MASKS)} (a window of 1024 in each document)"
    )
    option("--model", action="store_true", help=words)
    option("--layers", dest="train_layers", type=count, default=4, help="of the model")
    names = list(dict.fromkeys(x.name for x in (*CONTENDERS, *model.TRAININGS)))
    option("--contenders", nargs="+", choices=names, metavar="NAME")
    option("--preset", choices=PRESETS, help="options that are not given as of others")
    several: dict[str, Any] = {"nargs": "+", "choices": LOCAL_KERNELS, "default": ["ours"]}
    words = "of strategies, one after another; on a CPU ours"
    option("--local-kernel", dest="local_kernels", help=words, **several)
    words = "ranks that share heads in usp and loongtrain, by default as many as heads allow and leave a ring"
    option("--ulysses-degree", type=count, default=0, help=words)
    option("--window", type=count, default=0, help="ranks of a window of loongtrain's double ring")
    words = "time ours and strategies without moves, too: what is not hidden"
    option("--exposed", action=argparse.BooleanOptionalAction, help=words)
    several = {"nargs": "+", "choices": SAMPLERS, "help": "of documents, one after another"}
    option("--lengths", dest="samplers", **several)
    option("--packs", type=count, help="of documents, for each mask, length and sampler")
    more = ("tokens", "masks", "dtype", "vocab", "turn_ms", "seed")
    arguments.add(parser, (*arguments.RUN, *more), **dict.fromkeys(DEFAULTS))
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Measures; 1 if ours was wrong or failed, or if anybody was compiled again while time was taken."""
    wanted = DEFAULTS | PRESETS.get(args.preset, {}) | (OF_STEPS if args.model else {})
    vars(args).update({name: x for name, x in wanted.items() if getattr(args, name) is None})
    more = {"masks": ALL_MASKS} if args.all_masks else {}
    settings = arguments.settings_of(args, QUICK, **more)
    kind, gpus = settings.device, torch.cuda.device_count()
    able = {x.name for x in (model.TRAININGS if settings.model else CONTENDERS)}
    if settings.contenders and not able & set(settings.contenders):
        where, among = "of" if settings.model else "without", ", ".join(sorted(able))
        raise ValueError(f"`--contenders` {where} --model must be among {among}")
    unknown = [x for x in settings.masks if settings.model and x not in model.MASKS]
    if unknown:
        among = ", ".join(model.MASKS)
        raise ValueError(f"`--masks` of --model must be among {among}, got {unknown[0]}")
    wrong = [x for x in settings.tokens if x % BLOCK]
    if wrong:
        raise ValueError(f"`--tokens` must be multiples of {BLOCK}, got {wrong[0]}")
    if args.ranks and world.is_launched():
        raise ValueError("`--ranks` must not be given to processes of torchrun, which counts them")
    num_ranks = args.ranks or (gpus if kind == "cuda" else 2)
    if kind == "cuda" and not world.is_launched() and not 0 < num_ranks <= gpus:
        raise ValueError(f"`--ranks` must be at most the number of GPUs, {gpus}, got {num_ranks}")
    command = arguments.as_typed(args.command_line, args.out)
    return world.start(measure, num_ranks, kind, settings, command, args.out)


def measure(here: World, settings: Settings, command: list[str], out: Path | None) -> int:
    """On each rank; the exit code."""
    return runner.run(Ranks(settings, here), command, out)
