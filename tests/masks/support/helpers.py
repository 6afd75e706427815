"""What the mask tests share: the dense mask of a mask_mod, and its program by both ways."""

import itertools
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from magi_compile.masks import MaskProgram
from magi_compile.masks.program.trace import read_graph


def dense_mask(mask_mod: Callable, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """PyTorch's own dense mask, bool `[batch, seqlen_q, seqlen_k]`."""

    def of_all(b, h, q, kv):  # some mask_mods return a bool or do not depend on q
        return mask_mod(b, h, q, kv) & (q >= 0) & (kv >= 0)

    return create_mask(of_all, batch, None, seqlen_q, seqlen_k, device="cpu")[:, 0]


def evaluate(
    text: str,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    tables: Sequence = (),
    symbols: Sequence = (),
    heads: int = 1,
) -> Tensor:
    """A printed mask expression, as Python and PyTorch understand it: `[batch * heads, seqlen_q, seqlen_k]`."""

    names = {
        "b": torch.arange(batch)[:, None, None, None],
        "h": torch.arange(heads)[:, None, None],
        "q": torch.arange(seqlen_q)[:, None],
        "kv": torch.arange(seqlen_k),
        "min": torch.minimum,
        "max": torch.maximum,
        "where": torch.where,
        **{f"t{i}": tensor for i, tensor in enumerate(tables)},
        **{f"s{i}": torch.tensor(number) for i, number in enumerate(symbols)},
    }
    # Constants as tensors, so that ~ and // are those of tensors.
    text = re.sub(r"\b(\d+|True|False)\b", r"tensor(\1)", text)
    shown = eval(text, {"tensor": torch.tensor, **names})
    return shown.expand(batch, heads, seqlen_q, seqlen_k).flatten(0, 1)


def trace_graph(graph, captures: Sequence, names: Sequence[str] = ()) -> MaskProgram:
    """The program of a graph, which must be one mask of all heads."""
    program = read_graph(graph, captures, names)
    program.require_one_mask()
    return program


def packed(mask: Tensor) -> Tensor:
    """`[batch, seqlen_q, seqlen_k]` as the one mask of packed rows and keys."""
    return torch.block_diag(*mask.int()).bool()


def dynamo_program(
    mask_mod: Callable, batch: int, seqlen_q: int, seqlen_k: int, dynamic: bool | None = None
) -> tuple[MaskProgram, list[Tensor], list[int]]:
    """The program of the graph that Dynamo makes of a mask_mod, with the tables and ints it captures."""
    block_mask = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=1 << 30,
        mask_mod=mask_mod,
        seq_lengths=(seqlen_q, seqlen_k),
    )
    found = []

    def backend(gm, _):
        (node,) = gm.graph.find_nodes(
            op="call_function", target=torch.ops.higher_order.flex_attention
        )
        placeholders = gm.graph.find_nodes(op="placeholder")
        captures = node.args[8]

        def run(*args):
            interpreter = torch.fx.Interpreter(gm)
            interpreter.env = dict(zip(placeholders, args, strict=True))
            for made in itertools.takewhile(lambda made: made is not node, gm.graph.nodes):
                if made.op in ("call_function", "call_method"):
                    interpreter.env[made] = interpreter.run_node(made)
            values = [interpreter.env.get(capture, capture) for capture in captures]
            is_table = [isinstance(value, Tensor) for value in values]
            program = trace_graph(getattr(gm, node.args[4][-1].target), values)
            tables = [value for value, table in zip(values, is_table, strict=True) if table]
            symbols = [
                int(value) for value, table in zip(values, is_table, strict=True) if not table
            ]
            found.append((program, tables, symbols))
            return (query,)

        return run

    query = torch.zeros(batch, 1, seqlen_q, 16)
    key = torch.zeros(batch, 1, seqlen_k, 16)
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend=backend, fullgraph=True, dynamic=dynamic)
    compiled(query, key, key, block_mask=block_mask)
    return found[0]
