"""Packs prompts and their rollouts: what sequences begin with alike is there once, and every rollout sees it.

    prompt a b c, rollouts x y and z        ->        a b | c x y | c z

The token that branches off begins each branch: it predicts another token in each of them, and labels have one place
for each token. Branches that begin without a label share theirs, since nothing is predicted there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from magi_compile.masks.arguments import check_device, check_flag
from magi_compile.masks.block_mask import create_block_mask
from magi_compile.masks.library import NamedMask, tree

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NO_LABEL = -100  # of transformers and of PyTorch's cross entropy
Tokens = Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class PackedPrefixes:
    """A batch of one entry, which holds every shared prefix once.

    Attributes:
        input_ids: int64 `[1, total]`.
        position_ids: int64 `[1, total]`: those that each token has in its own sequence.
        labels: int64 `[1, total]`, as transformers takes them: row i - 1 predicts label i. -100 where there is none.
        mask: of `masks.library.tree`, as a mask_mod and as slices.
        rows: for each sequence, prompt after prompt and rollout after rollout, where its tokens are: int64
            `[length of prompt + length of rollout]`.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    mask: NamedMask
    rows: list[Tensor]

    @cached_property
    def block_mask(self) -> BlockMask:
        """The mask for `flex_attention`, and for `attention_mask` of transformers."""
        total = self.input_ids.shape[1]
        return create_block_mask(
            self.mask.mask_mod, None, None, total, total, self.input_ids.device
        )

    @cached_property
    def shift_labels(self) -> Tensor:
        """The labels where they are predicted: row i predicts `shift_labels[:, i]`."""
        return torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=NO_LABEL)

    @property
    def num_repeated_tokens(self) -> int:
        """The number of tokens of all sequences, each with its prompt."""
        return sum(len(rows) for rows in self.rows)

    def unpack(self, values: Tensor) -> list[Tensor]:
        """The values of each sequence.

        Args:
            values: `[1, total, ...]`: logits, say, or what every token has.

        Returns:
            For each sequence `[length, ...]`, as if it had been alone.

        Raises:
            TypeError: `values` is no tensor.
            ValueError: another number of tokens.
        """
        if not isinstance(values, Tensor):
            raise TypeError(f"`values` must be a tensor, got {type(values).__name__}")
        if values.shape[:2] != self.input_ids.shape:
            wanted = ", ".join(map(str, self.input_ids.shape))
            raise ValueError(f"`values` must be [{wanted}, ...], got shape {list(values.shape)}")
        return [values[0].index_select(0, rows) for rows in self.rows]

    def pack(self, values: Sequence[Sequence[float] | Tensor], fill: float = 0) -> Tensor:
        """Puts values of the tokens of each sequence in place: advantages, old log-probs, weights.

        Args:
            values: for each sequence `[length]`; where sequences share tokens, that of the last one counts.
            fill: for tokens of no sequence, which are padding.

        Returns:
            `[1, total]`, of the dtype that the values have.

        Raises:
            TypeError: `values` is no list, or `fill` no number.
            ValueError: another number of sequences or of tokens.
        """
        _check_list("values", values)
        if not isinstance(fill, (bool, int, float)):
            raise TypeError(f"`fill` must be a number, got {fill!r}")
        if len(values) != len(self.rows):
            raise ValueError(f"`values` must be of {len(self.rows)} sequences, got {len(values)}")
        device = self.input_ids.device
        each = [torch.as_tensor(x, device=device) for x in values]
        packed = each[0].new_full(self.input_ids.shape, fill)
        for number, (rows, own) in enumerate(zip(self.rows, each, strict=True)):
            if own.shape != rows.shape:
                raise ValueError(
                    f"`values[{number}]` must have shape {list(rows.shape)}, got {list(own.shape)}"
                )
            packed[0, rows] = own.to(packed.dtype)
        return packed


def pack_shared_prefixes(
    prompts: Sequence[Tokens],
    rollouts: Sequence[Sequence[Tokens]],
    labels: Sequence[Sequence[Tokens]] | None = None,
    *,
    share_labels: bool = False,
    pad_to_multiple_of: int = 1,
    pad_token_id: int = 0,
    device: torch.device | str = "cpu",
) -> PackedPrefixes:
    """Packs prompts once with their rollouts behind them, for one forward and backward of all.

    Sequences that begin alike share what they have in common, and so do those branches again: prompts with one system
    prompt, and rollouts that begin with the same tokens without labels. Logits, losses and gradients are those of a
    batch that repeats the prompts, for models whose layers mix tokens by attention with the mask alone.

    Args:
        prompts: token ids of each prompt, at least one.
        rollouts: for each prompt, the token ids of its rollouts, at least one token each.
        labels: like `rollouts`, -100 where a token has none; by default every token of a rollout is a label.
        share_labels: whether tokens with equal labels are shared too. Their loss counts once then, not once for each
            rollout, unless it is weighted; `unpack` gives each rollout its own.
        pad_to_multiple_of: the number of tokens is rounded up to a multiple of it.
        pad_token_id: of the tokens that are added, which see themselves alone.
        device: of all tensors.

    Returns:
        Tokens, positions, labels and mask.

    Raises:
        TypeError: tokens are not integers.
        ValueError: the lists do not fit each other, or one is empty.
    """
    device = check_device(device)
    if type(pad_to_multiple_of) is not int or pad_to_multiple_of < 1:
        raise ValueError(f"`pad_to_multiple_of` must be at least 1, got {pad_to_multiple_of!r}")
    check_flag("share_labels", share_labels)
    trie = _Trie(share_labels)
    ends = [trie.insert(*one) for one in _sequences(prompts, rollouts, labels)]
    nodes = trie.in_order()
    total = sum(len(node.tokens) for node in nodes)
    if missing := -total % pad_to_multiple_of:
        padding = torch.full((missing,), pad_token_id, dtype=torch.int64, device="cpu")
        nodes.append(_Node(padding, torch.full_like(padding, NO_LABEL), trie.root))
    lengths = [len(node.tokens) for node in nodes]
    for node, first in zip(nodes, itertools.accumulate(lengths, initial=0), strict=False):
        node.first = first
    numbers = {id(node): number for number, node in enumerate(nodes)}
    parents = [numbers.get(id(node.parent), -1) for node in nodes]
    mask = tree(lengths, parents, device=device)

    def joined(of_node: list[Tensor]) -> Tensor:
        return torch.cat(of_node)[None].to(device)

    return PackedPrefixes(
        joined([node.tokens for node in nodes]),
        joined([node.begin + torch.arange(len(node.tokens), device="cpu") for node in nodes]),
        joined([node.predicted_labels for node in nodes]),
        mask,
        [end.rows.to(device) for end in ends],
    )


def _sequences(
    prompts: Sequence[Tokens],
    rollouts: Sequence[Sequence[Tokens]],
    labels: Sequence[Sequence[Tokens]] | None,
) -> list[tuple[Tensor, Tensor]]:
    """The tokens and the labels of each prompt with each of its rollouts."""
    _check_list("prompts", prompts)
    _check_list("rollouts", rollouts)
    if labels is not None:
        _check_list("labels", labels)
    if not len(prompts) or len(rollouts) != len(prompts):
        raise ValueError(
            f"`rollouts` must have a list for each of `prompts`, at least one, got {len(rollouts)} lists "
            f"for {len(prompts)} prompts"
        )
    if labels is not None and len(labels) != len(prompts):
        raise ValueError(
            f"`labels` must have a list for each of `prompts`, {len(prompts)}, got {len(labels)}"
        )
    found = []
    for i, prompt in enumerate(prompts):
        begin = _tokens(f"prompts[{i}]", prompt)
        of_prompt = rollouts[i] if labels is None else labels[i]
        _check_list(f"rollouts[{i}]", rollouts[i])
        _check_list(f"labels[{i}]", of_prompt)
        if not len(rollouts[i]) or len(of_prompt) != len(rollouts[i]):
            raise ValueError(
                f"`rollouts[{i}]` must have rollouts, and `labels[{i}]` as many, got {len(rollouts[i])} and "
                f"{len(of_prompt)}"
            )
        for j, (given, own) in enumerate(zip(rollouts[i], of_prompt, strict=True)):
            rollout, own = _tokens(f"rollouts[{i}][{j}]", given), _tokens(f"labels[{i}][{j}]", own)
            if own.shape != rollout.shape:
                raise ValueError(
                    f"`labels[{i}][{j}]` must have {len(rollout)} entries, got {len(own)}"
                )
            none = torch.full_like(begin, NO_LABEL)
            found.append((torch.cat([begin, rollout]), torch.cat([none, own])))
    return found


def _check_list(name: str, given: Any) -> None:
    is_table = isinstance(given, Tensor) and given.dim() > 0
    if not is_table and (not isinstance(given, Sequence) or isinstance(given, (str, bytes))):
        raise TypeError(f"`{name}` must be a list, got {type(given).__name__}")


def _tokens(name: str, given: Tokens) -> Tensor:
    try:
        tokens = torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"`{name}` must be a list of ints: {error}") from None
    if tokens.dim() != 1 or not tokens.numel():
        raise ValueError(f"`{name}` must be a list of tokens, at least one, got {given!r}")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold integers, got {tokens.dtype}")
    return tokens.long()


@dataclass(eq=False)
class _Node:
    """Tokens that all sequences below it have.

    Attributes:
        tokens: int64 `[length]`.
        labels: int64 `[length]`.
        parent: the node above it; None for the root, which has no tokens.
        begin: the position of its first token.
        children: the nodes below it; the first one is packed right behind it.
        heads: those below it that others may share, by their first tokens and labels.
        twins: it and the copies of its last token, which have the same `heads`.
        is_end: whether a sequence ends with it.
        first: the row of its first token.
    """

    tokens: Tensor
    labels: Tensor
    parent: _Node | None
    begin: int = 0
    children: list[_Node] = field(default_factory=list)
    heads: dict[tuple[int, int], _Node] = field(default_factory=dict)
    twins: list[_Node] = field(default_factory=list)
    is_end: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        self.twins.append(self)

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def head(self) -> tuple[int, int]:
        return int(self.tokens[0]), int(self.labels[0])

    @property
    def predicted_labels(self) -> Tensor:
        """The labels, without that of a first token in front of which another sequence ends."""
        parent = self.parent
        assert parent is not None
        if parent.parent is not None and parent.children[0] is self:
            return self.labels
        return torch.cat([torch.full_like(self.labels[:1], NO_LABEL), self.labels[1:]])

    @property
    def rows(self) -> Tensor:
        """Those of its tokens and of all above it."""
        parts, node = [], self
        while node.parent is not None:
            parts.append(node.first + torch.arange(len(node.tokens), device="cpu"))
            node = node.parent
        return torch.cat(parts[::-1])

    def may_end_before(self, label: int) -> bool:
        """True if its last token has room for what comes next: a label of one branch, or none of any."""
        if label != NO_LABEL:
            return not (self.children or self.is_end)
        return all(int(child.labels[0]) == NO_LABEL for child in self.children)

    def split(self, count: int) -> _Node:
        """Makes a node of its own of the first `count` tokens, above the others."""
        parent = self.parent
        assert parent is not None
        upper = _Node(self.tokens[:count], self.labels[:count], parent, self.begin)
        parent.children[parent.children.index(self)] = upper
        if parent.heads.get(upper.head) is self:
            parent.heads[upper.head] = upper
        self.tokens, self.labels = self.tokens[count:], self.labels[count:]
        self.parent, self.begin = upper, upper.end
        upper.children, upper.heads = [self], {self.head: self}
        return upper


class _Trie:
    """The sequences by what they begin with."""

    def __init__(self, share_labels: bool):
        self.share_labels = share_labels
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        self.root = _Node(nothing, nothing, None)

    def insert(self, tokens: Tensor, labels: Tensor) -> _Node:
        """The node at which a sequence ends."""
        node = self.root
        while node.end < len(tokens):
            rest = slice(node.end, None)
            child = node.heads.get((int(tokens[node.end]), int(labels[node.end])))
            count = 0 if child is None else self.num_equal(child, tokens[rest], labels[rest])
            if child is None or not count:
                return self.branch(node, tokens[rest], labels[rest])
            node = child if count == len(child.tokens) else child.split(count)
        node = self.twin_before(node, NO_LABEL)
        node.is_end = True
        return node

    def num_equal(self, node: _Node, tokens: Tensor, labels: Tensor) -> int:
        """The number of tokens of a node that others may share that go on so."""
        size = min(len(tokens), len(node.tokens))
        differs = (node.tokens[:size] != tokens[:size]) | (node.labels[:size] != labels[:size])
        if not self.share_labels:
            differs |= labels[:size] != NO_LABEL
        return int(differs.int().argmax()) if bool(differs.any()) else size

    def branch(self, node: _Node, tokens: Tensor, labels: Tensor) -> _Node:
        """A new node below `node`, or below a copy of its last token, at which a sequence ends."""
        node = self.twin_before(node, int(labels[0]))
        made = _Node(tokens, labels, node, node.end, is_end=True)
        node.children.append(made)
        node.heads.setdefault(made.head, made)
        return made

    def twin_before(self, node: _Node, label: int) -> _Node:
        """`node`, or a copy of its last token, which has room for what comes next: `label`, or nothing."""
        if node.parent is None:
            return node
        for twin in node.twins:
            if twin.may_end_before(label):
                return twin
        parent = node.split(len(node.tokens) - 1) if len(node.tokens) > 1 else node.parent
        none = torch.full_like(node.labels, NO_LABEL)
        # Who looks below the one finds what is below the other.
        copied = _Node(node.tokens, none, parent, parent.end, heads=node.heads, twins=node.twins)
        parent.children.append(copied)
        return copied

    def in_order(self) -> list[_Node]:
        """All nodes but the root, depth first."""
        found, waiting = [], self.root.children[::-1]
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting += node.children[::-1]
        return found
