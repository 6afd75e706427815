"""Rows with what their one pass has beside the rest."""

from magi_bench.runner import Runner


def flat(row):
    """A row, its place and its pass in one."""
    (times,) = row.get("passes", {"": {}}).values()
    case = row["case"]
    place = {"mask": case["mask"], "pass": case["which"], "tokens": case["seqlen"]}
    return {**row, **place, "mode": case["mode"], "ranks": case["ranks"], **times}


def rows_of(suite):
    """What a run gives."""
    return [flat(row) for row in Runner(suite, say=lambda line: None).run()]
