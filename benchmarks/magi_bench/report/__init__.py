"""Reports of result files: Markdown, and one HTML page without anything from outside."""

from __future__ import annotations

from pathlib import Path

from magi_bench.report.markdown import to_markdown, write_readme_table
from magi_bench.report.page import to_html
from magi_bench.results.rows import Results

__all__ = ["write_readme_table", "write_report"]


def write_report(
    results: Results, output: Path, title: str | None = None, note: str = ""
) -> list[Path]:
    """Writes the report as `output` with .md and with .html, under the title of the first run or another; gives the
    files. A ValueError if there is nothing to report."""
    if not results.ok_rows():
        raise ValueError("the results must hold at least one measured row, got none")
    written = []
    for suffix, make in ((".md", to_markdown), (".html", to_html)):
        path = output.with_name(output.name + suffix)
        path.write_text(make(results, title, note))
        written.append(path)
    return written
