"""UnsupportedMaskError: what says why a mask has no intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from magi_compile._checks import MaskCheck, MaskDataError


class UnsupportedMaskError(NotImplementedError):
    """A valid mask that intervals cannot express.

    Args:
        reasons: every reason that was found; each is named once.
        what: what the message says before these.

    Attributes:
        reasons: why intervals cannot express it.
    """

    def __init__(self, reasons: Sequence[str], what: str = "this mask is not representable yet"):
        self.reasons = list(dict.fromkeys(reasons))
        super().__init__(f"{what}: {'; '.join(self.reasons)}")


def refuse_broken(checks: Iterable[MaskCheck]) -> None:
    """Raises UnsupportedMaskError for checks that fail of a mask without data: they always will."""
    reasons = []
    for check in checks:
        try:
            check.raise_if_broken()
        except MaskDataError as error:
            reasons.append(str(error))
    if reasons:
        raise UnsupportedMaskError(reasons)
