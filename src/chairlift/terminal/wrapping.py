"""Text that arrives in pieces, wrapped between words at the width of the terminal.

A word is written when its end is known, so nothing that is on the screen ever changes. The width is read for each word:
after a resize, the next line has the new width.
"""

from __future__ import annotations

import os
import re
import sys

from rich.cells import cell_len

from chairlift.terminal.console import without_controls

# Lines may break between characters of Chinese and Japanese, but not before closing punctuation or after opening one.
_WIDE = "\u2e80-\u303e\u3041-\ua4cf\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6\U00020000-\U0003fffd"
_OPENING = "「『（［｛〈《【〔“‘"
_CLOSING = "、。，．！？：；」』）］｝〉》】〕ー…ゝ々”’"
_PIECES = re.compile(rf"\n|[ \t]+|[{_WIDE}]|[^ \t\n{_WIDE}]+")
_IS_WIDE = re.compile(f"[{_WIDE}]")


def styled(text: str, style: str) -> str:
    """Return text between the codes that set a style, such as "1;4", and that end it."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and text else text


def terminal_width() -> int:
    try:
        return max(10, os.get_terminal_size(sys.stdout.fileno()).columns)
    except OSError:
        return 80


class WrappedText:
    """Writes to standard output, which must be a terminal; control characters in the text are dropped."""

    def __init__(self) -> None:
        self.indent = ""  # begins the lines after the first one of a paragraph; it may have styles
        self._indent_width = 0
        self._column = 0
        self._space = ""  # is written before the word, unless that begins a line
        self._word: list[tuple[str, str]] = []  # pieces and their styles
        self._endless = False  # a word that is longer than a line is written as it comes

    def set_indent(self, indent: str, width: int) -> None:
        self.indent, self._indent_width = indent, width

    def add(self, text: str, style: str = "") -> None:
        for piece in _PIECES.findall(without_controls(text)):
            if piece == "\n":
                self.end_line()
            elif piece.isspace():
                self._end_word()
                self._space += piece.replace("\t", "    ")
            else:
                self._add_to_word(piece, style)

    def add_unbroken(self, text: str, style: str = "") -> None:
        """Write text at once; the terminal breaks its lines, so that it is copied without line breaks."""
        self._end_word()
        self._put(self._space + without_controls(text), style)
        self._space = ""

    def end_line(self) -> None:
        self._end_word()
        self._new_line("")

    def close(self) -> None:
        """Write what is held back and end the line."""
        self._end_word()
        if self._column:
            self._new_line("")

    def flush(self) -> None:
        sys.stdout.flush()

    def _add_to_word(self, piece: str, style: str) -> None:
        if self._word and self._may_break(self._word[-1][0][-1], piece[0]):
            self._end_word()
        if self._endless:
            self._put(piece, style)
            return
        self._word.append((piece, style))
        if self._word_width() > terminal_width() - self._indent_width:
            self._end_word()
            self._endless = True

    @staticmethod
    def _may_break(before: str, after: str) -> bool:
        if before in _OPENING or after in _CLOSING:
            return False
        return bool(_IS_WIDE.match(before) or _IS_WIDE.match(after))

    def _word_width(self) -> int:
        return sum(cell_len(piece) for piece, _ in self._word)

    def _end_word(self) -> None:
        self._endless = False
        if not self._word:
            return
        end = self._column + cell_len(self._space) + self._word_width()
        word, self._word = self._word, []  # first, since Ctrl-C may come while it is written
        if end > terminal_width() and self._column > self._indent_width:
            self._new_line(self.indent)
            self._column = self._indent_width
        else:
            self._put(self._space, "")
        self._space = ""
        for piece, style in word:
            self._put(piece, style)

    def _new_line(self, indent: str) -> None:
        sys.stdout.write("\n" + indent)
        self._column, self._space = 0, ""

    def _put(self, text: str, style: str) -> None:
        sys.stdout.write(styled(text, style))
        column = self._column + cell_len(text)
        self._column = column if column <= terminal_width() else column % terminal_width()
