"""Warnings to the logger "magi_compile"."""

from __future__ import annotations

import logging

_logger = logging.getLogger("magi_compile")
_said: set[str] = set()


def warn_once(message: str) -> None:
    """Logs `message` as a warning, unless this process has logged it before."""
    if message not in _said:
        _said.add(message)
        _logger.warning("%s", message)
