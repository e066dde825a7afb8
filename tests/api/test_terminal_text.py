"""Text on a terminal: Markdown and wrapping as text arrives, the history file, and files of conversations."""

from __future__ import annotations

import io
import json
import os
import random
import re
import stat
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from chairlift.cli.conversation import Conversation
from chairlift.errors import InvalidParameter
from chairlift.terminal import markdown, wrapping
from chairlift.terminal.message_input import MAX_ENTRIES, History
from chairlift.terminal.options import ChatOptions, SamplingOptions
from chairlift.text.assistant_parts import AssistantPart, ContentDelta
from tests.api.terminal_chat import CODES

TEXT = r"""# A heading with *stress*

A paragraph with **bold text that is rather long and wraps**, *italic*, `a*b*c`, ~~struck~~, [link](http://a.org/b).
***Both***, snake_case_name, __init__, 2 * 3 * 4, \*literal\* and an unclosed **marker and `tick here
  - nested item that is long enough to wrap around the line and be indented
10. tenth with **bold `code` inside**
- [ ] task

> quoted text that is long enough to wrap around the end of this line, too
---
```python
def f(x):
    return "*a* long line of code that goes on beyond the width of the terminal, as code does" * x
```
| name | value |
|:-----|------:|
| **a** | 1 |
| 日本 | 22 |
日本語の文章は空白がないので、どこでも改行できますが、「句読点」は行の先頭に来てはいけません。한국어 단어 and so on.
https://example.org/a/very/long/address/that/does/not/fit/on/the/line/at/all/and/goes/on end.
-5 degrees and \(x\)"""


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (wrapping, markdown):
        monkeypatch.setattr(module, "terminal_width", lambda: 60)
    return 60


def render(pieces: Sequence[str]) -> str:
    """Return what the pieces become, without the notes about rows of tables."""
    out, before = io.StringIO(), sys.stdout
    sys.stdout = out
    try:
        wrapped = wrapping.WrappedText()
        text = markdown.MarkdownText(wrapped)
        for piece in pieces:
            text.push(piece)
        text.close()
        wrapped.close()
    finally:
        sys.stdout = before
    return out.getvalue()


def plain(text: str) -> str:
    return "\n".join(CODES.sub("", line.split("\r\x1b[K")[-1]) for line in text.split("\n"))


def joined(text: str) -> str:
    """Join neighbours of one style."""
    while (shorter := re.sub(r"(\x1b\[[\d;]+m)([^\x1b]*)\x1b\[0m\1", r"\1\2", text)) != text:
        text = shorter
    return text


def test_markdown_is_rendered(width: int) -> None:
    assert (
        plain(render([TEXT]))
        == """A heading with stress

A paragraph with bold text that is rather long and wraps,
italic, a*b*c, struck, link (http://a.org/b).
Both, snake_case_name, __init__, 2 * 3 * 4, *literal* and an
unclosed **marker and `tick here
  • nested item that is long enough to wrap around the line
    and be indented
10. tenth with bold code inside
• [ ] task

│ quoted text that is long enough to wrap around the end of
│ this line, too
────────────────────────────────────────────────────────────
```python
def f(x):
    return "*a* long line of code that goes on beyond the width of the terminal, as code does" * x
```
╭──────┬───────╮
│ name │ value │
├──────┼───────┤
│ a    │     1 │
│ 日本 │    22 │
╰──────┴───────╯
日本語の文章は空白がないので、どこでも改行できますが、「句読
点」は行の先頭に来てはいけません。한국어 단어 and so on.
https://example.org/a/very/long/address/that/does/not/fit/on/the/line/at/all/and/goes/on end.
-5 degrees and \\(x\\)
"""
    )


def test_the_cuts_between_pieces_do_not_matter(width: int) -> None:
    expected = joined(render([TEXT]))
    for seed in range(60):
        chance, pieces, rest = random.Random(seed), [], TEXT
        while rest:
            size = chance.randint(1, 7)
            pieces.append(rest[:size])
            rest = rest[size:]
        assert joined(render(pieces)) == expected


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("**a** b", "\x1b[1ma\x1b[0m b"),
        ("*a*", "\x1b[3ma\x1b[0m"),
        ("`**a**`", "\x1b[36m**a**\x1b[0m"),
        ("a_b_c _d_", "a_b_c \x1b[3md\x1b[0m"),
        ("## a", "\x1b[1;35ma\x1b[0m"),
        ("** a **", "** a **"),
        ("***a*** *****", "\x1b[1;3ma\x1b[0m *****"),
        ("#hashtag", "#hashtag"),
        ("\x1b[31mred \x07\x9b2J\u202eabc\r", "[31mred 2Jabc"),
        ("```\n\x1b[2J**a**", "\x1b[2m```\x1b[0m\n\x1b[36m[2J**a**\x1b[0m"),
    ],
)
def test_spans_and_control_characters(width: int, source: str, shown: str) -> None:
    assert joined(render([source])) == joined(render(list(source))) == f"{shown}\n"


@pytest.mark.parametrize(
    "unit", ["*", "`", "[a", "_a*b`", "| ", "a", "**a ", "|-", "~", "日", "\n|a|b|\n|-|-|\n", "> "]
)
def test_endless_text_is_shown_without_being_held_back(width: int, unit: str) -> None:
    text = unit * (20_000 // len(unit))
    kept = plain(render([text[i : i + 97] for i in range(0, len(text), 97)]))
    assert len(kept) > 1000


# ---- the history ------------------------------------------------------------------------------------------------


@pytest.fixture
def history_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "chairlift").mkdir(mode=0o700)
    return tmp_path / "chairlift" / "chat_history.jsonl"


def test_the_history_is_bounded_and_private(history_file: Path) -> None:
    history = History()
    for number in range(2 * MAX_ENTRIES + 1):
        history.add(str(number))
    history.add("x" * 100_000)
    history_file.chmod(0o644)
    entries = History().entries()
    assert entries == [str(number) for number in range(MAX_ENTRIES + 1, 2 * MAX_ENTRIES + 1)]
    assert len(history_file.read_text().splitlines()) == MAX_ENTRIES
    assert stat.S_IMODE(history_file.stat().st_mode) == 0o600
    assert [file.name for file in history_file.parent.iterdir()] == [history_file.name]


def test_a_damaged_history_costs_only_its_damaged_entries(history_file: Path) -> None:
    history_file.write_bytes(b'"good"\n\xff\xfe\nnot json\n{"a": 1}\n' + b"[" * 5000 + b'\n"\\u001b[2J\\ud800"\n"last"')
    assert History().entries() == ["good", "[2J?", "last"]


def test_a_history_that_is_a_link_or_in_a_folder_of_all_is_not_used(
    history_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    history_file.symlink_to(target)
    History().add("secret")
    assert not target.exists()
    target.write_text('"old"\n')
    assert History().entries() == []
    history_file.unlink()
    history_file.parent.chmod(0o777)
    History().add("secret")
    assert not history_file.exists()
    assert "No history: " in capsys.readouterr().err


# ---- files of conversations -------------------------------------------------------------------------------------


class Echo:
    """Answers with the last message."""

    model = "echo"
    cut_off = ""
    knows_defaults = True

    def __init__(self) -> None:
        self.asked: list[Sequence[Mapping[str, str]]] = []

    def defaults(self, preset: str | None) -> SamplingOptions:
        return SamplingOptions(preset=preset)

    def answer_limit(self, *, reasons: bool) -> int | None:
        return None if reasons else 1024

    def answer(
        self, messages: Sequence[Mapping[str, str]], changed: Mapping[str, Any], *, reasons: bool
    ) -> Generator[AssistantPart, None, None]:
        self.asked.append(messages)
        yield ContentDelta(messages[-1]["content"])

    def summary(self) -> str:
        return ""


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(Echo(), ChatOptions(), {}, quiet=True)


GOOD = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b'"text"',
        b"[]",
        b"[1]",
        b'{"messages": []}',
        b'{"messages": {}}',
        b'{"settings": {}}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "tool", "content": "x"}]}',
        b'{"messages": [{"role": "assistant", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        json.dumps({"messages": [GOOD, {"role": "system", "content": "late"}]}).encode(),
        json.dumps({"messages": [GOOD], "more": 1}).encode(),
        json.dumps({"messages": [GOOD], "settings": []}).encode(),
        json.dumps({"messages": [GOOD], "settings": {"temprature": 1}}).encode(),
        json.dumps({"messages": [GOOD], "settings": {"temperature": "hot"}}).encode(),
        json.dumps({"messages": [GOOD], "settings": {"temperature": float("nan")}}).encode(),
        json.dumps({"messages": [GOOD], "settings": {"max_tokens": -1}}).encode(),
        json.dumps({"messages": [GOOD], "settings": {"reasoning": "loud"}}).encode(),
        json.dumps({"messages": [GOOD], "settings": {"stop": [1]}}).encode(),
        json.dumps({"messages": [GOOD], "settings": {"seed": 2**80}}).encode(),
    ],
)
def test_a_wrong_file_is_one_line_and_changes_nothing(
    conversation: Conversation, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.json"
    file.write_bytes(content)
    with pytest.raises(InvalidParameter) as error:
        conversation.handle(f"/load {file}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    with pytest.raises(InvalidParameter, match="nothing to save"):
        conversation.handle(f"/save {tmp_path / 'new.json'}")


def test_devices_pipes_and_impossible_names_are_refused(conversation: Conversation, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path, "/dev/zero", "x" * 5000, "~nosuchuser/x", "a\0b", ""):
        with pytest.raises(InvalidParameter):
            conversation.handle(f"/load {name}")


class Seeded(Echo):
    """Has a seed that the user did not set."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Mapping[str, Any]] = []

    def defaults(self, preset: str | None) -> SamplingOptions:
        return SamplingOptions(seed=5)

    def answer(
        self, messages: Sequence[Mapping[str, str]], changed: Mapping[str, Any], *, reasons: bool
    ) -> Generator[AssistantPart, None, None]:
        self.changes.append(changed)
        yield ContentDelta("an answer")


def test_another_answer_has_another_seed_than_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Seeded()
    conversation = Conversation(backend, ChatOptions(), {}, quiet=True)
    for text in ("hello", "/retry", "/retry"):
        conversation.handle(text)
    assert backend.changes == [{}, {"seed": 6}, {"seed": 7}]


def test_a_system_message_with_half_of_a_character_can_be_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line of a program may have them."""
    conversation = Conversation(Echo(), ChatOptions(system="half: \udcff"), {}, quiet=True)
    conversation.handle("hello")
    for _ in range(2):
        conversation.handle(f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][0]["content"] == "half: ?"
    assert len(list(tmp_path.iterdir())) == 1


def test_openai_messages_are_loaded_and_saved_again(conversation: Conversation, tmp_path: Path) -> None:
    file, copy = tmp_path / "talk.json", tmp_path / "my copy.json"
    parts = [{"type": "text", "text": "in parts"}]
    messages = [{"role": "system", "content": "s"}, GOOD, {"role": "assistant", "content": "a"}]
    file.write_text(json.dumps([*messages, {"role": "user", "content": parts}]))
    conversation.handle(f"/load {file}")
    conversation.handle("/set stop \\n\\n")
    conversation.handle(f'/save "{copy}"')
    saved = json.loads(copy.read_text())
    assert saved["messages"] == [*messages, {"role": "user", "content": "in parts"}]
    assert saved["settings"] == {"stop": ["\n\n"], "reasoning": "show", "plain": False}
    conversation.handle("/retry")
    conversation.handle(f"/save {copy}")
    assert json.loads(copy.read_text())["messages"][-1] == {"role": "assistant", "content": "in parts"}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["my copy.json", "talk.json"]
