"""The code blocks of the documentation, and the commands in them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from chairlift.config import EngineConfig
from chairlift.options import alias_flags, options_of

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
_FENCED = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"^([A-Za-z_]\w*)=")
_SEPARATOR = re.compile(r"[;|&()]+")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def blocks() -> tuple[Block, ...]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCED.finditer(text):
            indent = len(match[1])
            body = "".join(line[indent:] or "\n" for line in match[3].splitlines(keepends=True))
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[2], body))
    return tuple(found)


def of_language(*languages: str) -> list[Block]:
    return [block for block in blocks() if block.language in languages]


def shell_text(block: Block) -> str:
    """The commands of a block; of a transcript only the lines behind a prompt, and those that continue them."""
    if block.language != "console":
        return block.text
    lines, continues = [], False
    for line in block.text.splitlines():
        if line.startswith("$ ") or continues:
            lines.append(line.removeprefix("$ "))
            continues = line.endswith("\\")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Command:
    """One command of a shell: its words, and the variables in front of it."""

    words: tuple[str, ...]
    variables: tuple[str, ...]


def commands(text: str) -> Iterator[Command]:
    """The commands of a shell's text. Loops and functions are no commands of the documentation."""
    pending = ""
    for line in text.splitlines():
        pending += line + "\n"
        if line.endswith("\\"):
            continue
        try:
            words = _words(pending.replace("\\\n", " "))
        except ValueError:  # A quotation goes on in the next line.
            continue
        pending = ""
        yield from _split(words)
    assert not pending.strip(), f"an open quotation: {pending}"


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _split(words: list[str]) -> Iterator[Command]:
    command: list[str] = []
    redirected = False
    for word in [*words, ";"]:
        if _SEPARATOR.fullmatch(word):
            names = [match[1] for each in command if (match := _VARIABLE.match(each))]
            leading = next((index for index, each in enumerate(command) if not _VARIABLE.match(each)), len(command))
            if command[leading:]:
                yield Command(tuple(command[leading:]), tuple(names[:leading]))
            command = []
        elif re.fullmatch(r"[<>]+", word):
            redirected = True
        elif redirected:
            redirected = False
        else:
            command.append(word)


def inline_code(page: Path) -> list[str]:
    """The code within the sentences and tables of a page; of a table with a column Chairlift only that column."""
    found, column = [], -1
    for line in _FENCED.sub("", page.read_text()).splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if "Chairlift" in cells and len(cells) > 1:
            column = cells.index("Chairlift")
        elif not cells:
            column = -1
        found += re.findall(r"`([^`\n]+)`", cells[column] if cells and column >= 0 else line)
    return found


@cache
def command_line() -> Any:
    import chairlift.cli.main as main

    return get_command(main.app)


def check_chairlift(words: list[str], *, names_only: bool = False) -> None:
    """Parse the arguments of `chairlift` without running anything; raises what a user would be shown.

    With `names_only` the values are not checked: those of plugins exist only where the plugin is loaded.
    """
    command, name = command_line(), "chairlift"
    context = command.make_context(name, list(words), resilient_parsing=True)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if names_only and rest[0] not in command.commands:
            return
        name, command, rest = command.resolve_command(context, rest)
        if hasattr(command, "commands"):
            context = command.make_context(name, list(rest), parent=context, resilient_parsing=True)
    if names_only:
        known = {flag for each in command.get_params(context) for flag in (*each.opts, *each.secondary_opts)}
        normalize = context.token_normalize_func or str
        unknown = [word for word in rest if word.startswith("--") and f"--{normalize(word[2:])}" not in known]
        assert not unknown, unknown
        return
    assert not any("-completion" in word for word in rest), "writes to the home folder"
    try:
        command.make_context(name, rest, parent=context)
    except typer.Exit as done:
        if done.exit_code:  # `--help` and `--version` end a command, too.
            raise


@cache
def all_flags() -> frozenset[str]:
    """The flags of all commands, with their aliases."""
    found = {f"--{alias}".replace("_", "-") for alias in alias_flags(options_of(EngineConfig))}

    def collect(command: Any, context: Any) -> None:
        for parameter in command.get_params(context):
            found.update((*parameter.opts, *parameter.secondary_opts))
        for name in command.list_commands(context) if hasattr(command, "commands") else ():
            collect(command.get_command(context, name), context)

    collect(command_line(), typer.Context(command_line()))
    return frozenset(found)


@cache
def paths() -> tuple[re.Pattern[str], ...]:
    """The paths that the server names in its code; a part in braces stands for any name."""
    found = set()
    for file in [*(ROOT / "src/chairlift/server").rglob("*.py"), *(ROOT / "src/chairlift/cluster").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"/[\w/{}.:-]*", node.value)
            ):
                found.add(node.value)
    return tuple(re.compile(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(path))) for path in sorted(found))


def is_path(path: str) -> bool:
    return any(pattern.fullmatch(path) for pattern in paths())
