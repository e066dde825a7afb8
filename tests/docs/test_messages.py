"""Every message that the troubleshooting page quotes is in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\0"


@cache
def texts() -> tuple[str, ...]:
    """The literals of the package; what an f-string fills in is a hole."""
    found = []
    for file in (ROOT / "src" / "chairlift").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def quoted() -> list[str]:
    """The messages: the code in the column `message` of each table."""
    messages, column = [], -1
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if "message" in cells:
            column = cells.index("message")
        elif not cells:
            column = -1
        elif column >= 0 and not cells[0].startswith("---"):
            messages += re.findall(r"`([^`]+)`", cells[column])[:1]
    return messages


def is_in_the_code(message: str) -> bool:
    """Whether the parts around `…` are in this order in one literal, or each in one of its own."""
    parts = [part.strip(" ;,()") for part in message.split("…")]
    parts = [part for part in parts if part]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(map(pattern.search, texts()))


def test_every_quoted_message_is_in_the_code() -> None:
    messages = quoted()
    assert len(messages) > 40
    assert [message for message in messages if not is_in_the_code(message)] == []


def test_a_message_that_is_gone_is_noticed() -> None:
    assert not is_in_the_code("the lift has stopped between … and …")
