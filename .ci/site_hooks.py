"""Hooks of mkdocs.yml: pages from outside of docs/, and links that lead there.

Documents link to one another by paths in the repository, so that they can be read without the site. Here README.md
becomes the home page, every linked file of the repository that is Markdown or data becomes part of the site, and
links to source code become plain text. A link that leads nowhere stays as it is, and `mkdocs build --strict` fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
HOME = {"README.md": "index.md"}
SHOWN = {".md", ".json", ".jsonl", ".html", ".png", ".svg"}
_LONG_CODE = re.compile(r"<code>([^<]{60,})</code>")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()#\s:]+)(#[^()\s]*)?\)")


def _site_uri(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return HOME.get(path) or path.removeprefix("docs/")


def _repository_path(uri: str) -> str:
    """The file of the repository behind a page."""
    for path, home in HOME.items():
        if uri == home:
            return path
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def on_files(files: Files, config) -> Files:
    waiting = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    waiting += [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        uri = _site_uri(path)
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            for _, _, target, _ in _LINK.findall((ROOT / path).read_text()):
                linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
                if (ROOT / linked).is_file() and Path(linked).suffix in SHOWN:
                    waiting.append(linked)
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    path = _repository_path(page.file.src_uri)
    if path.startswith("benchmarks/"):
        page.meta["search"] = {"exclude": True}

    def rewritten(match: re.Match) -> str:
        image, text, target, anchor = match.groups()
        linked = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not (ROOT / linked).exists():
            return match[0]
        uri = _site_uri(linked)
        if files.get_file_from_path(uri) is None:
            return text
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"{image}[{text}]({posixpath.relpath(uri, start)}{anchor or ''})"

    return _LINK.sub(rewritten, markdown)


def on_page_content(html: str, page, config, files: Files) -> str:
    """Code in tables stays on one line, but for what would make a table wider than a page (site.css)."""
    return _LONG_CODE.sub(r'<code class="long">\1</code>', html)
