"""Adds the files outside docs/ that pages link to, so that the site is complete without the repository beside it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDER = "repository"
LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]+)?(\))")
FENCED = re.compile(r"(^ *```.*?^ *```[^\S\n]*$)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE = re.compile(r"`[^`]+`")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".md": "markdown"}

# The page of the site and the file that it shows.
_sources: dict[str, Path] = {}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file outside docs/ that a page leads to, directly or through such a page."""
    _sources.clear()
    _sources.update({file.src_uri: DOCS / file.src_uri for file in files})
    pages = [source for source in _sources.values() if source.suffix == ".md"]
    for page in pages:
        for target in _targets(page):
            uri = _uri(target)
            if uri not in _sources:
                _sources[uri] = target
                files.append(File.generated(config, uri, content=_content(target)))
                if target.suffix == ".md":
                    pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files of the repository into links to pages of the site."""
    source = _sources[page.file.src_uri]
    here = os.path.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if _uri(target) not in _sources:
            return match[0]  # MkDocs names it as a link that leads nowhere.
        return match[1] + os.path.relpath(_uri(target), here or ".") + (match[3] or "") + match[4]

    parts = FENCED.split(markdown)
    return "".join(part if FENCED.fullmatch(part) else ROW.sub(_bare_pipes, LINK.sub(link, part)) for part in parts)


def _bare_pipes(row: re.Match[str]) -> str:
    """Git hosts want `|` in the code of a table as `\\|`; Python-Markdown would show the backslash."""
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])


def _targets(page: Path) -> list[Path]:
    """Return the files outside docs/ that a page links to."""
    text = FENCED.sub("", page.read_text())
    found = [(page.parent / match[2]).resolve() for match in LINK.finditer(text)]
    return [each for each in found if each.is_file() and each.is_relative_to(ROOT) and not each.is_relative_to(DOCS)]


def _uri(path: Path) -> str:
    """Return where the site has the page of a file."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return f"{FOLDER}/{name}" + ("" if path.suffix == ".md" else ".md")


def _content(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    return f"# {path.relative_to(ROOT)}\n\n```` {LANGUAGES.get(path.suffix, '')}\n{path.read_text().rstrip()}\n````\n"
