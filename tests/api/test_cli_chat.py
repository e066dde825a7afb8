"""`chairlift chat`: a conversation with a model in this process."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from chairlift.terminal.answers import no_echo
from tests.api.cli_runner import FAST, run, start
from tests.tiny import write_tiny_checkpoint

CHAT = ["--max-tokens", "4", "--ignore-eos", "--temperature", "0", *FAST]


def cached_tokens(notes: str) -> list[tuple[int, int]]:
    """For each answer, the number of prompt tokens and how many of them were cached."""
    found = re.findall(r"prompt of (\d+) tokens, (\d+) of them cached", notes)
    return [(int(prompt), int(cached)) for prompt, cached in found]


def test_chat_keeps_the_conversation_and_reuses_its_cache(tiny: str) -> None:
    result = run("chat", "--model", tiny, *CHAT, stdin="a chairlift never stops\nand neither does the engine\n")
    assert result.exit_code == 0, result.output
    (first, nothing), (second, cached) = cached_tokens(result.stderr)
    assert nothing == 0
    assert second > first
    assert cached == first // 16 * 16 > 0
    assert result.stderr.count("stopped after 4 tokens (max_tokens)") == 2


def test_chat_shows_the_default_length_of_answers(tiny: str) -> None:
    result = run("chat", "--model", tiny, *CHAT, stdin="/set max_tokens\n/set max_tokens default\n/quit")
    assert [line for line in result.stderr.splitlines() if line.startswith("max_tokens:")] == [
        "max_tokens: 4",
        "max_tokens: 1024 (default)",
    ]


def test_chat_commands(tiny: str) -> None:
    lines = ["hello", "/system be brief", "hello", "/reset", "hello", "/system", "hello", "/dance", "/help", "/quit"]
    result = run("chat", "--model", tiny, *CHAT, stdin="\n".join([*lines, "never read"]))
    assert result.exit_code == 0, result.output
    plain, system, anew, *rest = [prompt for prompt, _ in cached_tokens(result.stderr)]
    assert plain < anew < system
    assert len(rest) == 1
    assert "There is no /dance" in result.stderr
    assert "/system TEXT" in result.stderr


def test_quiet_chat_prints_answers_only(tiny: str) -> None:
    result = run("chat", "--model", tiny, *CHAT, "--quiet", stdin="hello\n")
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert not result.stderr


def test_a_message_longer_than_the_context_ends_a_piped_chat(tiny: str) -> None:
    result = run("chat", "--model", tiny, *CHAT, "--quiet", stdin="word " * 300 + "\nhello\n")
    assert result.exit_code == 2
    assert "error: prompt: has" in result.stderr


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    result = run("chat", "--model", str(folder), *CHAT, "--quiet", stdin="")
    assert result.exit_code == 2
    assert "error: --model: it has no chat template" in result.stderr
    completed = run("run", str(folder), "hello", *CHAT)
    assert completed.exit_code == 0, completed.output
    assert completed.stdout == run("generate", "hello", "--model", str(folder), *CHAT).stdout


def test_typed_characters_are_not_shown_during_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(master, "wb", buffering=0) as keyboard, os.fdopen(slave) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)

        def echoes() -> bool:
            return bool(termios.tcgetattr(slave)[3] & termios.ECHO)

        with suppress(KeyboardInterrupt), no_echo():
            assert not echoes()
            keyboard.write(b"typed ahead\n")
            raise KeyboardInterrupt
        assert echoes()
        assert terminal.readline() == "typed ahead\n"  # kept for the next prompt


def test_no_echo_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with no_echo():
        pass


def test_the_default_sampling_of_a_chat_is_the_models(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    chatting = ["chat", "--model", str(folder), "--quiet", "--max-tokens", "8", "--ignore-eos", *FAST]
    answers = {run(*chatting, stdin="hello\n").stdout for _ in range(2)}
    assert len(answers) == 1  # greedy
    completing = ["generate", "hello", *chatting[1:]]
    assert len({run(*completing).stdout for _ in range(2)}) == 1
    hot = {run(*chatting, stdin="hello\n", CHAIRLIFT_TEMPERATURE="100").stdout for _ in range(3)}
    assert len(hot) > 1  # a variable counts as given, too
    assert run("generate", "hello", "--beam-width", "2", *chatting[1:]).exit_code == 0
    (folder / "generation_config.json").write_text(json.dumps({"temperature": -7}))
    assert run(*chatting, stdin="hello\n").exit_code == 0


@pytest.fixture
def chatting(tiny: str) -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    options = ["--model", tiny, "--ignore-eos", "--max-tokens", "200", "--verbose", *FAST]
    with start("chat", *options, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        yield process
        process.kill()


def test_ctrl_c_stops_the_answer_but_not_the_chat(chatting: subprocess.Popen[bytes]) -> None:
    assert chatting.stdin is not None
    assert chatting.stdout is not None
    chatting.stdin.write(b"hello\n")
    chatting.stdin.flush()
    chatting.stdout.read(1)
    chatting.send_signal(signal.SIGINT)
    output, notes = chatting.communicate(b"/reset\nagain\n", timeout=120)
    assert chatting.returncode == 0, notes
    counts = [int(count) for count in re.findall(rb"(\d+) tokens at", notes)]
    assert len(counts) == 2
    assert counts[0] < 200 == counts[1]
    assert " …\n".encode() in output


def test_ctrl_c_between_answers_exits_with_130(chatting: subprocess.Popen[bytes]) -> None:
    assert chatting.stderr is not None
    while b"step " not in chatting.stderr.readline():  # the last line of the startup log, with --verbose
        pass
    chatting.send_signal(signal.SIGINT)
    _, notes = chatting.communicate(timeout=120)
    assert chatting.returncode == 130
    assert b"Traceback" not in notes
