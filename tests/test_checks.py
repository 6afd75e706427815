"""Failed checks: raised at once on a CPU; kept, reported once and named on a device that nobody waits for."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from magi_compile import MaskDataError, _checks
from magi_compile.masks import MaskCheck


def check(holds, message="`document` must be grouped", **options):
    return MaskCheck(torch.tensor(holds), message, **options)


@pytest.fixture
def flags(monkeypatch):
    """The flags of a device, as if the CPU were one, watched by `raise_pending`."""
    flags = _checks._DeviceFlags(torch.device("cpu"))
    monkeypatch.setattr(_checks, "_flags", {torch.device("cpu"): flags})
    return flags


def test_on_a_cpu_the_first_failure_raises_with_what_was_found():
    broken = check(False, detail="it is not at {}", values=(torch.tensor(7),))
    with pytest.raises(MaskDataError, match="`document` must be grouped, but it is not at 7"):
        _checks.require([check(True), broken])


def test_checks_of_fake_tensors_have_no_values_to_fail():
    with FakeTensorMode() as mode:
        _checks.require([MaskCheck(mode.from_tensor(torch.tensor(False)), "never seen")])


def test_flags_of_earlier_checks_do_not_disturb_tracing(flags):
    flags.submit([check(True)])
    with FakeTensorMode() as mode:
        _checks.require([MaskCheck(mode.from_tensor(torch.tensor(True)), "never seen")])
        _checks.raise_pending()


def test_a_later_success_does_not_hide_a_failure(flags):
    flags.submit([check(False)])
    flags.submit([check(True)])
    with pytest.raises(MaskDataError, match="`document` must be grouped"):
        _checks.raise_pending()


def test_a_failure_is_reported_once(flags):
    flags.submit([check(False), check(True, "another")])
    with pytest.raises(MaskDataError) as error:
        _checks.synchronize_checks()
    assert "another" not in str(error.value)
    _checks.raise_pending()


def test_flags_that_inference_mode_makes_serve_training():
    with torch.inference_mode():
        flags = _checks._DeviceFlags(torch.device("cpu"))
        flags.submit([check(True)])
    flags.submit([check(False)])
    with torch.inference_mode():
        flags.submit([check(False, "another")])
    assert set(flags.take_failures()) == {"`document` must be grouped", "another"}


def test_what_was_found_is_kept_with_the_failure(flags):
    def found(row, holds=False):
        values = (torch.tensor(row, dtype=torch.int32), torch.tensor(-3))
        return check(holds, detail="row {} looks up {}", values=values)

    flags.submit([found(7), found(9), found(11, holds=True)])
    with pytest.raises(MaskDataError, match=r"must be grouped, but row 9 looks up -3$"):
        _checks.raise_pending()
    flags.submit([found(11, holds=True)])
    _checks.raise_pending()


def test_every_message_is_kept_when_there_are_very_many(flags):
    for number in range(flags.CAPACITY + 5):
        flags.submit([check(True, f"message {number}")])
    flags.submit([check(False, "the last one")])
    with pytest.raises(MaskDataError, match="the last one"):
        _checks.raise_pending()


def test_what_the_launcher_has_made_of_a_mask_data_error():
    restored = _checks.as_raised(RuntimeError("MaskDataError: `t0` must be sorted: at 3"))
    assert isinstance(restored, MaskDataError)
    assert str(restored) == "`t0` must be sorted: at 3"
    refused = _checks.as_raised(RuntimeError("ValueError: `heads` must be 2"))
    assert (type(refused), str(refused)) == (ValueError, "`heads` must be 2")
    other = RuntimeError("CUDA error: MaskDataError")
    assert _checks.as_raised(other) is other
