"""Markdown that arrives in pieces, shown on a terminal as it comes.

Text is only ever appended: a word, or a span such as **bold**, is written when its end is known, and a table after its
last row. A marker that no other one closes in its line stays in the text. Line breaks stay where the model puts them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from io import StringIO

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chairlift.terminal.console import without_controls
from chairlift.terminal.wrapping import WrappedText, styled, terminal_width

BOLD, DIM, ITALIC, UNDERLINED, STRUCK, CODE, HEADING = "1", "2", "3", "4", "9", "36", "1;35"
MAX_SPAN = 400  # characters; a longer one is text with its markers
MAX_TABLE_COLUMNS, MAX_TABLE_ROWS = 24, 500

_SPAN = re.compile(
    r"(?P<ticks>`+)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|\*\*(?=\*?[^\s*])(?P<bold>.+?)(?<=\S)\*\*(?!\*)"
    r"|\*(?![\s*])(?P<star>.+?)(?<![\s*])\*(?!\*)"
    r"|(?<!\w)_(?![\s_])(?P<line>.+?)(?<![\s_])_(?!\w)"
    r"|~~(?=[^\s~])(?P<struck>.+?)(?<=\S)~~"
    r"|\[(?P<label>[^\[\]]+)\]\((?P<address>[^()\s]+)\)"
    r"|\\(?P<literal>[-*_`~#|<>.+])"
)
# What may become a span with more text.
_BEGUN_SPAN = re.compile(r"`.*|\*{1,3}(?![\s*]).*|_(?![\s_]).*|~(?:~(?!\s).*)?|\[[^\[\]]*(?:\](?:\([^()\s]*)?)?|\\")
_SPECIAL = re.compile(r"[`*_~\[\\]")
_STYLES = {"bold": BOLD, "star": ITALIC, "line": ITALIC, "struck": STRUCK}

_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_ITEM = re.compile(r"(\s*)([-*+]|\d{1,3}[.)])(\s+)")
_HEADING = re.compile(r"(#{1,6})\s+")
_RULE = re.compile(r"\s*([-*_])(?:\s*\1){2,}\s*")
_TABLE_RULE = re.compile(r"\s*\|?(?:\s*:?-+:?\s*\|)+(?:\s*:?-+:?\s*)?")
# The beginning of a line that does not show yet which kind of line it is.
_UNDECIDED = re.compile(r"\s*(?:#{0,6}|>|[-*+_][-*+_\s]*|`{1,2}|~{1,2}|\d{1,3}[.)]?\s*)")


class MarkdownText:
    """Renders Markdown to a terminal."""

    def __init__(self, out: WrappedText) -> None:
        self._out = out
        self._line = ""  # what is not written of the current line
        self._decided = False  # whether the beginning of the current line is written
        self._style = ""  # The style of the current line.
        self._before = ""  # the last character written of the line
        self._fence = ""  # what ends the block of code
        self._table: list[str] = []

    def push(self, text: str) -> None:
        *ended, rest = text.split("\n")
        for part in ended:
            self._line += part
            self._end_line()
        self._line += rest
        self._advance(at_end=False)

    def close(self) -> None:
        if self._line or self._decided:
            self._end_line()
        self._show_table()

    def _end_line(self) -> None:
        self._advance(at_end=True)
        if self._decided:
            self._out.end_line()
        self._line, self._decided, self._style, self._before = "", False, "", ""
        self._out.set_indent("", 0)

    def _advance(self, *, at_end: bool) -> None:
        """Write as much of the line as is certain."""
        if not self._decided:
            self._decided = self._in_code(at_end) if self._fence else self._begin_line(at_end)
        if not self._decided:
            return
        if self._fence:
            self._out.add_unbroken(self._line, CODE)
            self._line = ""
            return
        pieces, self._line, self._before = read_spans(self._line, self._style, self._before, at_end=at_end)
        for text, style in pieces:
            self._out.add(text, style)

    # ---- lines ---------------------------------------------------------------------------------------------------

    def _in_code(self, at_end: bool) -> bool:
        stripped = self._line.strip()
        if not at_end:
            return bool(stripped.strip(self._fence[0])) or len(self._line) > MAX_SPAN
        if len(stripped) >= len(self._fence) and not stripped.strip(self._fence[0]):
            self._out.add_unbroken(self._line, DIM)
            self._line, self._fence = "", ""
        return True

    def _begin_line(self, at_end: bool) -> bool:
        """Write the marker of a line and set its style, once it is known; false for lines that are kept for later."""
        line = self._line
        if line.lstrip().startswith("|") and len(self._table) < MAX_TABLE_ROWS:
            if at_end:
                self._add_row(line)
                self._line = ""
            return False
        fence = _FENCE.match(line)
        if not at_end and (fence or _UNDECIDED.fullmatch(line)) and len(line) < MAX_SPAN:
            return False
        self._show_table()
        if fence:
            self._fence = fence[1]
            self._out.add_unbroken(line, DIM)
            self._line = ""
        elif at_end and _RULE.fullmatch(line):
            self._out.add_unbroken("─" * terminal_width(), DIM)
            self._line = ""
        elif heading := _HEADING.match(line):
            self._style = HEADING
            self._line = line[heading.end() :]
        elif item := _ITEM.match(line):
            marker = f"{item[1]}{'•' if item[2] in '-*+' else item[2]} "
            self._out.add_unbroken(marker)
            self._out.set_indent(" " * len(marker), len(marker))
            self._line = line[item.end() :]
        elif line.lstrip().startswith(">"):
            bar = styled("│ ", DIM)
            self._out.add_unbroken("│ ", DIM)
            self._out.set_indent(bar, 2)
            self._line = line.lstrip()[1:].lstrip()
        else:
            margin = len(line) - len(line.lstrip())
            self._out.add_unbroken(line[:margin])
            self._out.set_indent(" " * margin, margin)
            self._line = line[margin:]
        return True

    # ---- tables --------------------------------------------------------------------------------------------------

    def _add_row(self, line: str) -> None:
        self._table.append(line)
        sys.stdout.write(f"\r\x1b[K{styled(f'table, row {len(self._table)} …', DIM)}")

    def _show_table(self) -> None:
        lines, self._table = self._table, []
        if not lines:
            return
        sys.stdout.write("\r\x1b[K")
        cells = [list(_cells(line)) for line in lines]
        if len(lines) < 2 or not _TABLE_RULE.fullmatch(lines[1]) or len(cells[0]) > MAX_TABLE_COLUMNS:
            for line in lines:
                self._out.add(line + "\n")
            return
        table = Table(box=ROUNDED, border_style="dim")
        for heading, rule in zip(cells[0], [*cells[1], *cells[0]], strict=False):
            right, left = rule.endswith(":"), rule.startswith(":")
            table.add_column(_rich(heading), justify="center" if right and left else "right" if right else "left")
        for row in cells[2:]:
            table.add_row(*map(_rich, row[: len(cells[0])]))
        drawn = StringIO()
        Console(file=drawn, width=terminal_width(), force_terminal=True, color_system="standard").print(table)
        sys.stdout.write(drawn.getvalue())


def _cells(line: str) -> Iterator[str]:
    for cell in re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|")):
        yield cell.strip().replace("\\|", "|")


def _rich(text: str) -> Text:
    pieces, _, _ = read_spans(without_controls(text), "", "", at_end=True)
    return Text.from_ansi("".join(styled(piece, style) for piece, style in pieces))


# ---- spans ------------------------------------------------------------------------------------------------------


def read_spans(text: str, style: str, before: str, *, at_end: bool) -> tuple[list[tuple[str, str]], str, str]:
    """Return the pieces of a text with their styles, without the markers of its spans, then the rest, in which a span
    has begun, and the last character before it. `before` is the last character before the text."""
    pieces: list[tuple[str, str]] = []
    while text:
        special = _SPECIAL.search(text)
        size = len(text) if special is None else special.start()
        if size:
            pieces.append((text[:size], style))
        else:
            window = before + text[:MAX_SPAN]
            span = _SPAN.match(window, len(before))
            size = 0 if span is None else span.end() - len(before)
            may_grow = not at_end and len(text) < MAX_SPAN
            if may_grow and (_BEGUN_SPAN.fullmatch(text) if span is None else size == len(text)):
                break
            if span is None:
                size = len(text) - len(text.lstrip(text[0]))
                pieces.append((text[:size], style))
            else:
                pieces += _span_pieces(span, style)
        before, text = text[size - 1], text[size:]
    return pieces, text, before


def _span_pieces(span: re.Match[str], style: str) -> list[tuple[str, str]]:
    def also(more: str) -> str:
        return f"{style};{more}" if style else more

    if span["code"]:
        return [(span["code"], also(CODE))]
    if span["literal"]:
        return [(span["literal"], style)]
    if span["label"]:
        shown = [(span["label"], also(UNDERLINED))]
        return shown if span["label"] == span["address"] else [*shown, (f" ({span['address']})", also(DIM))]
    kind = next(name for name in _STYLES if span[name])
    return read_spans(span[kind], also(_STYLES[kind]), "", at_end=True)[0]
