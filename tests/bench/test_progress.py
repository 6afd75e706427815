"""Phases that take long say what they do."""

import time

import pytest

from magi_bench import progress
from magi_bench.progress import said_while


def said(monkeypatch, seconds, every):
    monkeypatch.setattr(progress, "SILENT_S", every)
    lines = []
    with said_while(lambda: f"{len(lines)} lines before", lines.append):
        time.sleep(seconds)
    at_end = list(lines)
    time.sleep(3 * every if every < 1 else 0)
    assert lines == at_end  # no more once it is done
    return lines


def test_a_long_phase_says_what_it_does(monkeypatch):
    lines = said(monkeypatch, 0.5, 0.05)
    assert lines[:2] == ["0 lines before", "1 lines before"]


def test_a_short_phase_says_nothing(monkeypatch):
    assert said(monkeypatch, 0.0, 30.0) == []


def test_a_phase_that_fails_is_over(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_S", 0.02)
    lines = []
    with pytest.raises(ValueError, match="failed"), said_while(lambda: "at work", lines.append):
        raise ValueError("failed")
    time.sleep(0.1)
    assert lines == []
