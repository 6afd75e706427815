"""Masks that come from outside of a graph are derived in front of it, once for their content.

    compiled(q, k, v, block lists, tables)   ->   slices, plan = kept, or derived from block lists and tables
                                                  compiled(q, k, v, block lists, tables, slices, plan)

A BlockMask that a graph is given has lists that somebody made before. Whoever writes to its tensors through PyTorch
moves their version; whoever makes a new BlockMask has new tensors. So as long as these are the same objects with the
same versions, slices and plan are as well, for every layer and every graph. They are inputs of the compiled graph,
which never writes to them, and which CUDA graphs copy like any other input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from magi_compile import _compat
from magi_compile._checks import as_raised, raise_pending
from magi_compile._kept import Made, Memo
from magi_compile.lowering.emit import value_key, value_of
from magi_compile.lowering.flex_call import writes_to
from magi_compile.ops import library  # noqa: F401  (defines the ops)
from magi_compile.ops.masks import (  # noqa: F401  (define the ops)
    mask_bits,
    mask_intervals,
    mask_slices,
    mask_table,
    plan_lists,
)

MAX_KEPT = 64  # masks, the least recently used goes

_LISTS = torch.ops.magi.plan_lists.default
_INTERVALS = torch.ops.magi.mask_intervals.default
_BESIDE = (_INTERVALS, torch.ops.magi.mask_table.default)
_MASKS = (
    *(torch.ops.magi.mask_slices.default, torch.ops.magi.mask_bits.default),
    *(_LISTS, *_BESIDE),
)
_PLANS = (torch.ops.magi.plan.default,)
_BLOCK_LISTS, _VERIFY = 8, 10  # arguments of those that have a mask_mod
# What may stand between the inputs of a graph and its masks: sizes, and sums of sizes.
_OF_SIZES = (torch.ops.aten.sym_size.int, operator.add, operator.mul, operator.floordiv)


class GraphInput(NamedTuple):
    """An input of the graph: a tensor, the size of one, or a number."""

    number: int
    dim: int | None = None
    is_tensor: bool = False

    def number_of(self, inputs: Sequence[Any]) -> int:
        """The number behind an argument: the input itself, or one of its sizes."""
        found = inputs[self.number]
        return found if self.dim is None else found.shape[self.dim]


class Prologue:
    """A function of a graph's inputs that gives the tensors of its masks."""

    def __init__(self, module: GraphModule, places: Sequence[GraphInput], example: Tensor):
        self.module = module
        self._forward = module.forward  # without the hooks of modules
        self.places = places
        self.device = example.device
        self.text = f"{module.code} {example.device}"
        self._tensors = _taker([x.number for x in places if x.is_tensor])
        self._sizes = [x for x in places if not x.is_tensor]

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        raise_pending()
        tensors = self._tensors(inputs)
        sizes = [x.number_of(inputs) for x in self._sizes]
        key = (self.text, *sizes)
        return _kept.get(tensors, key, lambda: Made(self.derive(tensors, sizes)), self.device)

    def derive(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """The tensors of the masks, computed."""
        given, numbers = iter(tensors), iter(sizes)
        arguments = [next(given if x.is_tensor else numbers) for x in self.places]
        return tuple(self._forward(*arguments))


def _taker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes the items of these numbers."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return lambda items: tuple([items[number] for number in numbers])


_kept: Memo[tuple[Tensor, ...]] = Memo(MAX_KEPT, lambda values: values)


class Split(NamedTuple):
    """A graph whose masks are inputs, and what gives these.

    Attributes:
        graph: takes the tensors of its masks behind those other inputs that it still needs.
        example_inputs: for all of them.
        prologue: gives the tensors of the masks; None where there are none.
        needed: which of the other inputs the graph takes.
    """

    graph: GraphModule
    example_inputs: list[Any]
    prologue: Prologue | None = None
    needed: tuple[int, ...] = ()

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function of the other inputs alone, which raises what our ops raise."""
        prologue, needed = self.prologue, _taker(self.needed)
        if prologue is None and not any(map(_is_ours, self.graph.graph.nodes)):
            return compiled
        # Dynamo keeps out of this function as it does out of what it calls.
        compiled = _compat.without_disable(compiled)

        def run(*args: Any) -> Any:
            try:
                if prologue is None:
                    return compiled(*args)
                return compiled(*needed(args), *prologue(args))
            except RuntimeError as error:
                restored = as_raised(error)
                if restored is error:
                    raise
                raise restored from None

        return run


def _is_ours(node: Node) -> bool:
    return getattr(node.target, "namespace", None) == "magi"


def split_off(root: GraphModule, example_inputs: list[Any]) -> Split:
    """Takes the masks that come from outside out of a lowered graph, which gets an input for each of their tensors.

    `root` is a graph of Dynamo, which stays as it is where there is such a mask, since Dynamo has more to read in it.
    `example_inputs` are what Dynamo gave for its inputs.
    """
    is_whole = len(root.graph.find_nodes(op="placeholder")) == len(example_inputs)
    masks = [node for node in root.graph.nodes if _is_from_outside(node)]
    read_by_masks = [value_of(x) for x in _needed_by(masks) if _is_tensor_input(x)]
    if not (is_whole and masks) or any(writes_to(x, read_by_masks) for x in root.graph.nodes):
        return Split(root, example_inputs)
    whole, root = root, _compat.copy_of_dynamo_graph(root)
    placeholders = root.graph.find_nodes(op="placeholder")
    masks = [node for node in root.graph.nodes if _is_from_outside(node)]
    taken = [node for node in root.graph.nodes if _belongs_to(node, masks)]
    needed = _needed_by(masks)
    made = [node for node in root.graph.nodes if node in needed or node in taken]
    if not all(
        node.op == "placeholder" or node in taken or node.target in _OF_SIZES for node in made
    ):
        return Split(whole, example_inputs)
    outputs = [
        node
        for node in taken
        if isinstance(value_of(node), Tensor) and _is_used_outside(node, taken)
    ]
    examples = [value_of(node) for node in outputs]
    module, places = _module_of(made, outputs, placeholders)
    _read_from_inputs(root.graph, outputs, placeholders[-1])
    for node in reversed(taken):
        root.graph.erase_node(node)
    for node in reversed(made):
        if node.op != "placeholder" and node not in taken and not node.users:
            root.graph.erase_node(node)
    read = _erase_unread_inputs(root.graph, placeholders)
    root.graph.lint()
    root.recompile()
    inputs = [*(example_inputs[i] for i in read), *examples]
    return Split(root, inputs, Prologue(module, places, examples[0]), tuple(read))


def _needed_by(masks: Sequence[Node]) -> set[Node]:
    """`masks` and all that they are made of; of the size of an input, not the input."""
    needed: set[Node] = set()
    waiting = list(masks)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += () if _is_size_of_input(node) else node.all_input_nodes
    return needed


def _module_of(
    made: Sequence[Node], outputs: Sequence[Node], placeholders: Sequence[Node]
) -> tuple[GraphModule, list[GraphInput]]:
    """A function that computes `outputs` by the nodes `made`, and the places of its arguments among the inputs of the
    graph."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    places = []
    for node in sorted(made, key=lambda node: not _is_given(node)):
        if _is_given(node):
            source, dim = node.args if _is_size_of_input(node) else (node, None)
            is_tensor = source is node and _is_tensor_input(node)
            places.append(GraphInput(placeholders.index(source), dim, is_tensor))  # type: ignore[arg-type]
            copies[node] = graph.placeholder(node.name)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule({}, graph), places


def _read_from_inputs(graph: Graph, outputs: Sequence[Node], last: Node) -> None:
    """Puts inputs of the graph, behind its `last` one, in place of `outputs`."""
    with graph.inserting_after(last):
        for number, node in reversed(list(enumerate(outputs))):
            entry = graph.placeholder(f"magi_mask_{number}")
            entry.meta[value_key(node)] = value_of(node)
            _compat.mark_as_without_source(entry)
            node.replace_all_uses_with(entry)


def _erase_unread_inputs(graph: Graph, placeholders: Sequence[Node]) -> list[int]:
    """Takes out tensors that nobody reads, and returns the numbers of the inputs that stay.

    Each input costs every call, and a BlockMask has eight tensors.
    """
    read = []
    for number, entry in enumerate(placeholders):
        if not entry.users and _is_tensor_input(entry):
            graph.erase_node(entry)
        else:
            read.append(number)
    return read


def _is_from_outside(node: Node) -> bool:
    """True if it derives a mask whose block lists and captured tensors are inputs of the graph."""
    if node.target not in _MASKS:
        return False
    is_of_lists = node.target is _LISTS
    tensors = [*node.args[0], *([] if is_of_lists else node.args[_BLOCK_LISTS])]  # type: ignore[misc]
    is_input = all(isinstance(x, Node) and x.op == "placeholder" for x in tensors)
    if is_of_lists:
        inputs = (x.args[0] if x.target is operator.getitem else x for x in node.all_input_nodes)
        made = [x for x in inputs if isinstance(x, Node) and x.target in _BESIDE]
        return is_input and all(map(_is_from_outside, made))
    if node.target in _BESIDE:  # of each graph once, where it captures no tensor
        return is_input and not node.args[_VERIFY]
    return bool(node.args[_BLOCK_LISTS]) and is_input and not node.args[_VERIFY]


def _is_size_of_input(node: Node) -> bool:
    if node.target is not torch.ops.aten.sym_size.int:
        return False
    source = node.args[0]
    return isinstance(source, Node) and source.op == "placeholder"


def _is_tensor_input(node: Node) -> bool:
    return node.op == "placeholder" and isinstance(value_of(node), Tensor)


def _is_given(node: Node) -> bool:
    """True if it is an argument of the prologue."""
    return node.op == "placeholder" or _is_size_of_input(node)


def _belongs_to(node: Node, masks: Sequence[Node]) -> bool:
    """True if it is one of the masks, its plan, or a part of either."""
    if node in masks:
        return True
    if node.target is operator.getitem or node.target in _PLANS:
        sources = [
            x for x in node.all_input_nodes if isinstance(value_of(x), (Tensor, tuple, list))
        ]
        return bool(sources) and all(_belongs_to(source, masks) for source in sources)
    return False


def _is_used_outside(node: Node, taken: Sequence[Node]) -> bool:
    return any(user not in taken for user in node.users)
