"""Programs of mask_mods that do the same are read once."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as create_flex_block_mask
from torch.nn.attention.flex_attention import create_mask, flex_attention

from magi_compile.lowering.report import REPORT
from magi_compile.masks import UnsupportedMaskError, create_block_mask
from magi_compile.masks.program import read
from magi_compile.masks.program.read import read_mask_mod


@pytest.fixture(autouse=True)
def no_programs(monkeypatch):
    monkeypatch.setattr(read, "_programs", {})
    monkeypatch.setattr(read, "_structures", {})


def of_documents(document, window=None):
    def mask_mod(b, h, q, kv):
        mask = (document[q] == document[kv]) & (q >= kv)
        return mask if window is None else mask & (q - kv < window)

    return mask_mod


def documents(*lengths, dtype=torch.int64):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(dtype)


def test_other_data_have_the_same_program_and_their_own_tables():
    first = read_mask_mod(of_documents(documents(3, 5)))
    other = documents(4, 4)
    second = read_mask_mod(of_documents(other))
    assert second.program is first.program
    assert second.tables[0] is other


def counted(monkeypatch):
    """How often a mask_mod is called to be read."""
    calls, record = [], read.record
    monkeypatch.setattr(read, "record", lambda *given: calls.append(1) or record(*given))
    return calls


def test_a_mask_mod_that_is_made_anew_is_not_called_again(monkeypatch):
    calls = counted(monkeypatch)
    for lengths in ((3, 5), (4, 4), (8,)):
        document = documents(*lengths)
        traced = read_mask_mod(of_documents(document))
        assert traced.tables == traced.watched
        assert traced.tables[0] is document
    assert len(calls) == 1
    read_mask_mod(of_documents(document, window=3))
    read_mask_mod(of_documents(document), "meta")
    assert len(calls) == 3


def by_its_numbers(document):
    limit = 4

    def branches(b, h, q, kv):
        return (q >= kv) if document[0] > 0 else (q <= kv)

    def has_length(b, h, q, kv):
        return kv < len(document.unique()) + (q - q)

    def has_number(b, h, q, kv):
        return q - kv < document[-1].item() + limit

    def counts(b, h, q, kv):
        return q - kv < int(document.sum())

    return branches, has_length, has_number, counts


@pytest.mark.parametrize("number", range(4))
def test_what_follows_from_numbers_is_asked_each_time(monkeypatch, number):
    calls, shown = counted(monkeypatch), []
    for values in ([0, 1, 2, 3], [1, 1, 5, 9]):
        mask_mod = by_its_numbers(torch.tensor(values))[number]
        program = read_mask_mod(mask_mod).program
        shown.append(program.text)
    assert len(calls) == 2
    assert shown[0] != shown[1]


def test_tensors_that_a_mask_mod_makes_itself(monkeypatch):
    """They are its tables, and others each time."""
    calls = counted(monkeypatch)

    def of_limits(limits):
        return lambda b, h, q, kv: torch.arange(8)[q] >= limits[kv]

    for _ in range(2):
        assert len(read_mask_mod(of_limits(torch.zeros(8, dtype=torch.int64))).tables) == 2
    assert len(calls) == 2


@pytest.mark.parametrize(
    "mask_mod",
    [
        of_documents(documents(3, 6)),
        of_documents(documents(3, 5, dtype=torch.int32)),
        of_documents(documents(3, 5), window=2),
        of_documents(torch.stack([documents(3, 5)] * 2, 1)[:, 0]),
        lambda b, h, q, kv: q >= kv,
    ],
    ids=["length", "dtype", "window", "strides", "another function"],
)
def test_what_differs_is_read_anew(mask_mod):
    first = read_mask_mod(of_documents(documents(3, 5))).program
    assert read_mask_mod(mask_mod).program is not first


def test_numbers_that_are_captured_count():
    programs = {read_mask_mod(of_documents(documents(4), window=i)).program.text for i in range(3)}
    assert len(programs) == 3


def test_a_default_dtype_counts():
    def mask_mod(b, h, q, kv):
        return q * 0.1 >= kv * 0.1

    read_mask_mod(mask_mod)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        read_mask_mod(mask_mod)
    finally:
        torch.set_default_dtype(before)
    assert len(read._programs) == 2


def test_what_failed_with_some_data_is_tried_again_with_others():
    def mask_mod(first, table):
        def mask_mod(b, h, q, kv):
            return table[first[q]] * 2.0 == kv

        return mask_mod

    table = torch.arange(4)
    wrong, right = torch.full((4,), 9), torch.zeros(4, dtype=torch.int64)
    read_mask_mod(mask_mod(wrong, table))
    program = read_mask_mod(mask_mod(right, table)).program
    read._programs.clear()
    assert program.text == read_mask_mod(mask_mod(right, table)).program.text


def test_not_more_than_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(read, "MAX_PROGRAMS", 2)
    for window in range(5):
        read_mask_mod(of_documents(documents(4), window=window))
    assert len(read._programs) == 2


def written_clone(document):
    def mask_mod(b, h, q, kv):
        own = document.clone()
        own[2:4] = 0
        return own[q] == own[kv]

    return mask_mod


def written_by_a_view(document):
    def mask_mod(b, h, q, kv):
        x = q ^ kv
        y = torch.swapdims(x.unsqueeze(0), 0, 0)
        x += 9
        return y.select(0, 0) > 3

    return mask_mod


def written_behind_a_conversion(document):
    def mask_mod(b, h, q, kv):
        x = q.to(torch.int64)
        q += 5
        return x >= kv

    return mask_mod


def looked_up_by_a_number(document):
    def mask_mod(b, h, q, kv):
        x = document[q]
        y = x.view(1)[0]  # for FlexAttention a value of its own
        x.mul_(2)
        return y >= kv

    return mask_mod


@pytest.mark.parametrize("make", [written_clone])
def test_writes_that_are_not_followed_are_refused(make):
    """They would be lost; block lists come from the mask_mod itself."""
    mask_mod = make(documents(3, 5))
    wanted = create_mask(mask_mod, 1, 1, 8, 8, device="cpu")
    with pytest.raises(UnsupportedMaskError, match=r"writes to a tensor|used again"):
        _ = read_mask_mod(mask_mod).program.solved
    lists = create_block_mask(mask_mod, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=1)
    assert torch.equal(lists.to_dense().bool(), wanted)


def test_a_sparse_tensor():
    table = torch.eye(8).to_sparse_csr()
    mask_mod = lambda b, h, q, kv: table.to_dense()[q, kv] > 0  # noqa: E731
    assert read_mask_mod(mask_mod).tables[0] is table


def written_by_an_index(document):
    def mask_mod(b, h, q, kv):
        x = q ^ kv
        x[...] = 3
        return x > kv

    return mask_mod


def test_writes_by_an_index_are_refused():
    """Block lists come from the mask_mod itself."""
    mask_mod = written_by_an_index(None)
    wanted = create_mask(mask_mod, 1, 1, 8, 8, device="cpu")
    with pytest.raises(UnsupportedMaskError, match="`setitem` changes"):
        _ = read_mask_mod(mask_mod).program.solved
    lists = create_block_mask(mask_mod, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=1)
    assert torch.equal(lists.to_dense().bool(), wanted)


def captured_and_written(document):
    def mask_mod(b, h, q, kv):
        document[...] = q
        return document[q] > kv

    return mask_mod


def alias_and_written(document):
    alias = document.view(-1)

    def mask_mod(b, h, q, kv):
        x = alias.expand(8)
        x.mul_(2)
        return document[q] > kv

    return mask_mod


def index_and_written(document):
    def mask_mod(b, h, q, kv):
        document.view(-1)[q] = kv
        return document[q] > kv

    return mask_mod


@pytest.mark.parametrize("make", [captured_and_written, alias_and_written, index_and_written])
def test_writes_to_captured_tensors_are_refused(make):
    document = documents(3, 5)
    before = document.clone()
    with pytest.raises(UnsupportedMaskError):
        _ = read_mask_mod(make(document)).program.solved
    assert torch.equal(document, before)


def clone_of_an_index(document):
    def mask_mod(b, h, q, kv):
        x = (q + 0 * kv).clone()
        y = x.clone()
        x.add_(kv)
        return (x > 9) & (y > kv)

    return mask_mod


def read_before_written(document):
    def mask_mod(b, h, q, kv):
        x = q ^ kv
        before = x + 1
        view = x.view(())
        x.add_(5)
        return (before > 3) & (view > 9)

    return mask_mod


def inplace_true(document):
    def mask_mod(b, h, q, kv):
        x = q - kv
        view = x.view(())
        torch.nn.functional.relu(x, inplace=True)
        return (view >= 2) | (view == 0)

    return mask_mod


def looked_up_and_written(document):
    def mask_mod(b, h, q, kv):
        x = document[(q + kv) % 8]
        view = x.view(())
        x += 1
        return view == document[q]

    return mask_mod


@pytest.mark.parametrize(
    "make",
    [
        written_by_a_view,
        written_behind_a_conversion,
        clone_of_an_index,
        read_before_written,
        inplace_true,
        looked_up_and_written,
        looked_up_by_a_number,
    ],
)
def test_writes_that_a_view_sees_are_followed(make):
    """The attention, compiled, is that of PyTorch's mask."""
    mask_mod = make(documents(3, 5))
    wanted = create_mask(mask_mod, 1, 1, 8, 8, device="cpu")
    assert read_mask_mod(mask_mod).program.is_verifiable
    x = torch.zeros(1, 1, 8, 8)
    REPORT.clear()
    torch._dynamo.reset()
    v = torch.eye(8)[None, None]
    block_mask = create_flex_block_mask(mask_mod, 1, 1, 8, 8, device="cpu")
    attend = torch.compile(
        lambda x, v: flex_attention(x, x, v, block_mask=block_mask),
        backend="magi",
        fullgraph=True,
    )
    assert torch.equal(attend(x, v) > 0, wanted)
    assert (len(REPORT.lowered), len(REPORT.refused)) == (1, 0)
