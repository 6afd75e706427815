"""Packed prompts and rollouts: each sequence sees itself alone, and every label is predicted once."""

import random

import pytest
import torch

from magi_compile.masks import pack_shared_prefixes
from magi_compile.masks.shared_prefixes import NO_LABEL


def random_batch(seed):
    """Few different tokens, so that sequences begin alike; labels for some of the rollouts' tokens, or None."""
    generator = random.Random(seed)
    words = generator.choice([2, 3, 50])

    def tokens(most):
        return [generator.randrange(words) for _ in range(generator.randint(1, most))]

    prompts = [tokens(6) for _ in range(generator.randint(1, 4))]
    rollouts = [[tokens(5) for _ in range(generator.randint(1, 4))] for _ in prompts]
    labels = [
        [[t if generator.random() < 0.6 else NO_LABEL for t in one] for one in own]
        for own in rollouts
    ]
    return prompts, rollouts, None if seed % 2 else labels


def predictions(tokens, labels):
    """What each label is predicted from, and the label, in one sequence."""
    return [(tuple(tokens[:i]), labels[i]) for i in range(1, len(tokens)) if labels[i] != NO_LABEL]


@pytest.mark.parametrize("share_labels", [False, True])
def test_every_sequence_is_as_if_alone(share_labels):
    for seed in range(60):
        prompts, rollouts, labels = random_batch(seed)
        packed = pack_shared_prefixes(
            prompts,
            rollouts,
            labels,
            share_labels=share_labels,
            pad_to_multiple_of=1 + 7 * (seed % 3),
        )
        total = packed.input_ids.shape[1]
        assert total % (1 + 7 * (seed % 3)) == 0
        seen = packed.mask.slices.to_dense()
        place = torch.arange(total)
        assert torch.equal(packed.mask.mask_mod(0, 0, place[:, None], place), seen)
        wanted = []
        pairs = [
            (prompt + one, [NO_LABEL] * len(prompt) + of_one)
            for prompt, own, of_own in zip(prompts, rollouts, labels or rollouts, strict=True)
            for one, of_one in zip(own, of_own, strict=True)
        ]
        shifted = packed.unpack(packed.shift_labels)
        assert [x.tolist() for x in shifted] == [[*labels[1:], NO_LABEL] for _, labels in pairs]
        for rows, (tokens, of_tokens) in zip(packed.rows, pairs, strict=True):
            assert packed.input_ids[0, rows].tolist() == tokens
            assert packed.position_ids[0, rows].tolist() == list(range(len(tokens)))
            for count, row in enumerate(rows.tolist(), 1):
                assert torch.equal(seen[row].nonzero().flatten(), rows[:count])
            wanted += predictions(tokens, of_tokens)
        found = [
            (tuple(packed.input_ids[0, seen[row]].tolist()), label)
            for row, label in enumerate(packed.shift_labels[0].tolist())
            if label != NO_LABEL
        ]
        if share_labels:
            assert set(found) == set(wanted)
        else:
            assert sorted(found) == sorted(wanted)
        assert packed.num_repeated_tokens == sum(len(tokens) for tokens, _ in pairs)


def test_a_prompt_is_there_once():
    prompt, rollouts = list(range(12)), [[20, 21, 22, 23], [30, 31], [40, 41, 42]]
    packed = pack_shared_prefixes([prompt], [rollouts])
    assert packed.input_ids[0].tolist() == [*prompt, *rollouts[0], 11, 30, 31, 11, 40, 41, 42]
    assert packed.position_ids[0].tolist() == [*range(16), 11, 12, 13, 11, 12, 13, 14]
    none = [NO_LABEL]
    assert packed.labels[0].tolist() == 12 * none + [
        20,
        21,
        22,
        23,
        *none,
        30,
        31,
        *none,
        40,
        41,
        42,
    ]
    assert packed.shift_labels[0].tolist() == [*packed.labels[0, 1:].tolist(), *none]
    assert packed.block_mask.shape == (1, 1, 23, 23)


def test_sixteen_rollouts_of_which_three_quarters_are_shared():
    generator = torch.Generator().manual_seed(0)
    prompt, *rollouts = (
        torch.randint(1000, (count,), generator=generator) for count in (3072, *[1024] * 16)
    )
    packed = pack_shared_prefixes([prompt], [rollouts])
    assert packed.num_repeated_tokens / packed.input_ids.shape[1] > 3.36
    assert len(packed.mask.slices) <= 2 * 17


def test_labels_that_are_shared():
    """The rollouts part behind their first two tokens, which one row each predicts."""
    rollouts = [[7, 8, 9], [7, 8, 10], [7, 8, 10, 11]]
    packed = pack_shared_prefixes([[1, 2]], [rollouts], share_labels=True)
    assert packed.input_ids[0].tolist() == [1, 2, 7, 8, 9, 8, 10, 10, 11]
    none = NO_LABEL
    assert packed.labels[0].tolist() == [none, none, 7, 8, 9, none, 10, none, 11]


def test_a_branch_without_a_label_has_its_own_last_token():
    """Else the label of the other one would stand where it predicts nothing."""
    prompt, labels = [5, 6], [[1], [NO_LABEL], [NO_LABEL], [3]]
    packed = pack_shared_prefixes([prompt], [[[1], [0], [2], [3]]], [labels])
    assert packed.input_ids[0].tolist() == [5, 6, 1, 6, 0, 2, 6, 3]
    none = NO_LABEL
    assert packed.shift_labels[0].tolist() == [none, 1, none, none, none, none, 3, none]
    assert [x.tolist() for x in packed.rows] == [[0, 1, 2], [0, 3, 4], [0, 3, 5], [0, 6, 7]]


def test_a_prompt_that_another_one_goes_on_from():
    for prompts in ([[5, 6], [5, 6, 7]], [[5, 6, 7], [5, 6]]):
        packed = pack_shared_prefixes(prompts, [[[1]], [[2]]])
        found = [x.tolist() for x in packed.unpack(packed.shift_labels)]
        none = NO_LABEL
        wanted = [[none, 1, none], [none, none, 2, none]]
        wanted = wanted if len(prompts[0]) == 2 else [[none, none, 1, none], [none, 2, none]]
        assert found == wanted


def test_values_of_sequences():
    packed = pack_shared_prefixes([[1, 2]], [[[3, 4], [5]]], pad_to_multiple_of=8)
    values = packed.pack([[0.0, 0, 1, 2], torch.tensor([0.0, 0, 3])], fill=-1)
    assert values.tolist() == [[0, 0, 1, 2, 0, 3, -1, -1]]
    assert [x.tolist() for x in packed.unpack(values)] == [[0, 0, 1, 2], [0, 0, 3]]
    assert packed.input_ids[0, 6:].tolist() == [0, 0]
    with pytest.raises(ValueError, match="`values` must be of 2 sequences, got 1"):
        packed.pack([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match=r"`values\[1\]` must have shape \[3\], got \[2\]"):
        packed.pack([[1, 2, 3, 4], [1, 2]])
    with pytest.raises(TypeError, match="`values` must be a list, got int"):
        packed.pack(3)
    with pytest.raises(TypeError, match="`fill` must be a number, got None"):
        packed.pack([[1, 2, 3, 4], [1, 2, 3]], fill=None)
    with pytest.raises(TypeError, match="`values` must be a tensor, got list"):
        packed.unpack([])
    with pytest.raises(ValueError, match=r"`values` must be \[1, 8, \.\.\.\], got shape \[8\]"):
        packed.unpack(values[0])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([], []), {}, ValueError, "at least one, got 0 lists for 0 prompts"),
        (([[1]], []), {}, ValueError, "a list for each of `prompts`, at least one, got 0 lists for 1"),
        (([[1]], [[]]), {}, ValueError, r"`rollouts\[0\]` must have rollouts, .* got 0 and 0"),
        (([[1]], [[[2]]], [[]]), {}, ValueError, r"`labels\[0\]` as many, got 1 and 0"),
        (([[]], [[[2]]]), {}, ValueError, r"`prompts\[0\]` must be a list of tokens, at least one, got \[\]"),
        (([[1]], [[[]]]), {}, ValueError, r"`rollouts\[0\]\[0\]` must be a list of tokens"),
        (([[1.5]], [[[2]]]), {}, TypeError, r"`prompts\[0\]` must hold integers, got torch.float32"),
        (([[1]], [[[2]]], [[[2, 3]]]), {}, ValueError, r"`labels\[0\]\[0\]` must have 1 entries, got 2"),
        ((3, [[[2]]]), {}, TypeError, "`prompts` must be a list, got int"),
        ((["a"], [[[2]]]), {}, TypeError, r"`prompts\[0\]` must be a list of ints"),
        (([[1]], None), {}, TypeError, "`rollouts` must be a list, got NoneType"),
        (([[1]], [3]), {}, TypeError, r"`rollouts\[0\]` must be a list, got int"),
        (([[1]], [[[2]]], 3), {}, TypeError, "`labels` must be a list, got int"),
        (([[1]], [[[2]]], []), {}, ValueError, "`labels` must have a list for each of `prompts`, 1, got 0"),
        (([[1]], [[[2]]], [None]), {}, TypeError, r"`labels\[0\]` must be a list, got NoneType"),
        (([[1]], [[[2]]]), {"share_labels": 1}, TypeError, "`share_labels` must be True or False, got 1"),
        (([[1]], [[[2]]]), {"pad_to_multiple_of": 0}, ValueError, "`pad_to_multiple_of` must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        pack_shared_prefixes(*arguments, **options)
