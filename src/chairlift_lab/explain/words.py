"""Converts the subset of Markdown used by the guide to HTML."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from textwrap import fill

LINE = 120

_PICTURE = re.compile(r"\[\[([\w-]+)\]\]")
_SPANS = (
    (re.compile(r"`([^`]+)`"), r"<code>\1</code>"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"\*([^*]+)\*"), r"<em>\1</em>"),
)


def blocks(text: str) -> list[str]:
    """Paragraphs, headings, lists, tables and pictures, which blank lines separate."""
    return [block.strip() for block in re.split(r"\n\s*\n", text.strip())]


def picture_name(block: str) -> str | None:
    found = _PICTURE.fullmatch(block)
    return found.group(1) if found else None


def to_html(text: str, picture: Callable[[str], str]) -> str:
    return "\n".join(_block(block, picture) for block in blocks(text))


def to_markdown(text: str, picture: Callable[[str], str]) -> str:
    """Standard Markdown: replaces picture lines, and rewraps lines after figures were filled in."""
    found = ((block, picture_name(block)) for block in blocks(text))
    return "\n\n".join(_filled(block) if name is None else picture(name) for block, name in found)


def _filled(block: str) -> str:
    if block.startswith(("```", "#", "|")):
        return block
    if not _is_list(block):
        return _fill(block, "")
    return "\n".join(_fill(entry, " " * (entry.index(" ") + 1)) for entry in _entries(block))


def _fill(text: str, indent: str) -> str:
    words = " ".join(text.split())
    return fill(words, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _is_list(block: str) -> bool:
    return re.match(r"(-|\d+\.) ", block) is not None


def _entries(block: str) -> list[str]:
    return re.split(r"\n(?=-|\d+\. )", block)


def _block(block: str, picture: Callable[[str], str]) -> str:
    name = picture_name(block)
    if name is not None:
        return picture(name)
    lines = block.splitlines()
    if block.startswith("```"):
        return f"<pre><code>{escape(chr(10).join(lines[1:-1]))}</code></pre>"
    if block.startswith("## "):
        return f"<h2>{_spans(block[3:])}</h2>"
    if block.startswith("|"):
        return _table(lines)
    if _is_list(block):
        kind = "ul" if block.startswith("-") else "ol"
        items = "".join(f"<li>{_spans(entry[entry.index(' ') + 1 :])}</li>" for entry in _entries(block))
        return f"<{kind}>{items}</{kind}>"
    return f"<p>{_spans(block)}</p>"


def _table(lines: list[str]) -> str:
    rows = [[_spans(cell.strip()) for cell in line.strip("|").split("|")] for line in lines]
    head = "".join(f"<th>{cell}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[2:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _spans(text: str) -> str:
    shown = escape(" ".join(text.split()), quote=False)
    for pattern, tag in _SPANS:
        shown = pattern.sub(tag, shown)
    return shown
