"""The little of Markdown that the guide is written in, as HTML."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

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
    """Markdown as others know it: only the pictures are ours."""
    found = ((block, picture_name(block)) for block in blocks(text))
    return "\n\n".join(block if name is None else picture(name) for block, name in found)


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
    if re.match(r"(-|\d+\.) ", block):
        kind = "ul" if block.startswith("-") else "ol"
        entries = re.split(r"\n(?=-|\d+\. )", block)
        items = "".join(f"<li>{_spans(re.sub(r'^(-|[0-9]+[.]) ', '', entry))}</li>" for entry in entries)
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
