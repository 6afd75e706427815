"""What a record of a run says of the sources."""

from pathlib import Path

from magi_bench.results import provenance


def test_the_hash_of_the_sources_does_not_depend_on_how_the_file_system_lists_them(monkeypatch):
    before, listed = provenance._source_hash(), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *args: reversed([*listed(*args)]))
    assert provenance._source_hash() == before
