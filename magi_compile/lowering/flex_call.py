"""One FlexAttention call of a Dynamo graph: its arguments, and where they come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from magi_compile import _compat
from magi_compile.functions.names import is_in_place
from magi_compile.lowering.emit import Emitter, value_key, value_of
from magi_compile.masks.evaluation.sizes import Heads

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
OURS = Path(__file__).parents[1]


@dataclass(frozen=True)
class FlexCall:
    """The arguments of one FlexAttention call, as every supported version of torch lays them out."""

    node: Node
    q: Node
    k: Node
    v: Node
    score_mod: GraphModule
    block_mask: tuple[Any, ...]
    mask_mod: GraphModule
    scale: float
    kernel_options: dict[str, Any]
    score_buffers: tuple[Any, ...]
    mask_buffers: tuple[Any, ...]
    #: The block lists that the mask_mod has to agree with: none where there are none or they were made from it.
    block_lists: tuple[Node, ...]
    #: What the captured tensors of the mask are in the graph that the graph of the call is called by.
    table_sources: tuple[Node, ...] = ()
    #: What the block lists are there.
    list_sources: tuple[Node, ...] = ()
    #: Whether the graph returns the output itself, to code that may write to it.
    is_returned: bool = False
    #: Those of q, k and v that are inputs of the graph, from code that may write to them before the backward.
    given: tuple[Node, ...] = ()

    @classmethod
    def parse(cls, gm: GraphModule, node: Node, root: GraphModule) -> FlexCall:
        """Reads the call `node` of `gm`, which is `root` or a graph inside it."""
        arguments: Any = node.args
        q, k, v, score_mod, block_mask, scale, options, *buffers = arguments
        score_buffers, mask_buffers = (*buffers, (), ())[:2]
        block_lists = _given_block_lists(block_mask, gm, root)
        mods = [getattr(gm, mod.target) for mod in (score_mod, block_mask[-1])]
        for mod in mods:
            _keep_floats_in_tensors(mod, value_of(q).dtype)
        return cls(
            node=node,
            q=q,
            k=k,
            v=v,
            score_mod=mods[0],
            block_mask=block_mask,
            mask_mod=mods[1],
            scale=scale,
            kernel_options=dict(options),
            score_buffers=tuple(score_buffers),
            mask_buffers=tuple(mask_buffers),
            block_lists=block_lists,
            table_sources=tuple(_outer(x, gm, root) for x in mask_buffers if is_tensor(x)),
            list_sources=tuple(_outer(x, gm, root) for x in block_lists),
            is_returned=gm is root and _is_returned(node),
            given=tuple(x for x in (q, k, v) if gm is root and x.op == "placeholder"),
        )

    @property
    def block_size(self) -> list[int]:
        """Rows and keys of a block of the BlockMask."""
        return list(self.block_mask[-3:-1])

    @property
    def lengths(self) -> tuple[Any, Any, Any]:
        """Batch entries, and queries and keys of one, as far as they are known."""
        q, k = (value_of(node).shape for node in (self.q, self.k))
        return q[0], q[2], k[2]

    @property
    def heads(self) -> Heads:
        """The numbers of heads of q and of keys, which are static in every graph."""
        return Heads(*(int(value_of(node).shape[1]) for node in (self.q, self.k)))

    @property
    def shapes(self) -> tuple[tuple[int | str, ...], tuple[int | str, ...]]:
        """Those of q and k for readers; a size that is dynamic in the graph by its symbol."""
        q, k = (
            tuple(s if isinstance(s, int) else str(s) for s in value_of(node).shape)
            for node in (self.q, self.k)
        )
        return q, k

    def emit_lengths(self, emit: Emitter) -> tuple[Any, Any, Any]:
        """`lengths` in the graph: nodes where they are dynamic."""
        batch, seqlen_q = emit.size(self.q, 0), emit.size(self.q, 2)
        return batch, seqlen_q, emit.size(self.k, 2)

    @property
    def mask_tables(self) -> list[Node]:
        """The captured tensors of the mask, in order."""
        return [buffer for buffer in self.mask_buffers if is_tensor(buffer)]

    @property
    def mask_symbols(self) -> list[Any]:
        """The captured ints of the mask, in order."""
        return [buffer for buffer in self.mask_buffers if not is_tensor(buffer)]

    @property
    def needs_cpu_gradients(self) -> bool:
        """True if it needs gradients on a CPU, which FlexAttention does not have."""
        tensors = [value_of(node) for node in (self.q, self.k, self.v)]
        return tensors[0].device.type == "cpu" and any(tensor.requires_grad for tensor in tensors)

    @property
    def location(self) -> str:
        """The innermost line of the model in the call's stack, as `file:line in function`."""
        frames = FRAME.findall(self.node.meta.get("stack_trace") or "")
        frames = [
            frame
            for frame in frames
            if "torch/nn/attention" not in frame[0] and not Path(frame[0]).is_relative_to(OURS)
        ]
        if not frames:
            return ""
        path, line, function = frames[-1]
        if Path(path).is_relative_to(Path.cwd()):
            path = str(Path(path).relative_to(Path.cwd()))
        return f"{path}:{line} in {function}"


def _keep_floats_in_tensors(mod: GraphModule, dtype: torch.dtype) -> None:
    """Dynamo passes a Python float that has changed between calls as a tensor, of which the graph takes `item()`. Here
    and in Inductor the tensor itself does as well: of `dtype` where that is float64, else of PyTorch's default."""
    dtype = torch.float64 if dtype == torch.float64 else torch.get_default_dtype()
    for node in mod.graph.find_nodes(op="call_method", target="item"):
        (tensor,) = node.args
        if tensor.op == "placeholder" and value_of(tensor).is_floating_point():
            node.target, node.args = "to", (tensor, dtype)
            node.meta.pop("example_value", None)
            mod.recompile()


def _is_returned(node: Node) -> bool:
    outputs = (item for item in node.users if item.args[1] == 0)
    return any(user.op == "output" for item in outputs for user in item.users)


def _given_block_lists(
    block_mask: tuple[Any, ...], gm: GraphModule, root: GraphModule
) -> tuple[Node, ...]:
    """`kv_num_blocks`, `kv_indices` and the same of full blocks, where they come from outside of the graphs."""
    if any(value_of(size) >= _compat.LARGE_SPARSE_BLOCK_SIZE for size in block_mask[-3:-1]):
        return ()
    lists = tuple(node for node in block_mask[2:6] if node is not None)
    made = all(_is_made_from_mask_mod(_outer(node, gm, root)) for node in lists)
    return () if made else lists


def _is_made_from_mask_mod(node: Node) -> bool:
    """True if PyTorch's `create_block_mask` computes `node` in the graph."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    calls = {name for path, _, name in frames if "torch/nn/attention" in path}
    return node.op != "placeholder" and "create_block_mask" in calls


def _outer(node: Node, gm: GraphModule, root: GraphModule) -> Node:
    """The node of the outer graph behind an input of the graph `gm` inside `root`."""
    if node.op != "placeholder" or gm is root:
        return node
    inputs = gm.graph.find_nodes(op="placeholder")
    for module in graphs(root):
        for body in module.graph.find_nodes(op="get_attr"):
            if getattr(module, body.target, None) is gm:
                (caller, *_) = body.users
                outer = caller.args[-len(inputs) :][inputs.index(node)]
                return _outer(outer, module, root)
    return node


def graphs(root: GraphModule) -> list[GraphModule]:
    """`root` and the graphs inside it."""
    return [module for module in root.modules() if isinstance(module, GraphModule)]


def may_write(node: Node) -> bool:
    """True if a node of a graph may write to what it is given, or a graph that it calls may: of other operators of
    higher order nobody knows."""
    if _compat.is_of_higher_order(node.target):
        inner = [_inner_graph(x) for x in node.all_input_nodes]
        called = [x for x in inner if x is not None]
        return not called or any(may_write(x) for module in called for x in module.graph.nodes)
    return is_in_place(node)


def writes_to(node: Node, tensors: Sequence[torch.Tensor]) -> bool:
    """True if a node of a graph may write to memory of one of `tensors`, which are fake."""
    if not may_write(node):
        return False
    given = tree_leaves([x.meta.get(value_key(x)) for x in node.all_input_nodes])
    written = [x for x in given if isinstance(x, torch.Tensor)]
    return any(_compat.share_memory(x, y) for x in written for y in tensors)


def _inner_graph(node: Node) -> GraphModule | None:
    """The graph behind a node that stands for one."""
    if node.op != "get_attr":
        return None
    found = getattr(node.graph.owning_module, str(node.target), None)
    return found if isinstance(found, GraphModule) else None


def is_tensor(buffer: Any) -> bool:
    return isinstance(value_of(buffer), torch.Tensor)
