"""`chairlift chat` and `run` as they are used: real bytes through a pseudo-terminal, against a scripted server."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.cli_runner import run
from tests.api.terminal_chat import ScriptedServer, TerminalProgram, scripted_server
from tests.scripted_model import write_scripted_checkpoint

PASTE, PASTE_END = "\x1b[200~", "\x1b[201~"
CTRL_D, UP = "\x04", "\x1b[A"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def chat(server: ScriptedServer, state: Path) -> Iterator[TerminalProgram]:
    server.answer, server.requests = ("Hello there.",), []
    program = TerminalProgram("chat", "--url", server.url, XDG_STATE_HOME=str(state))
    try:
        program.wait_for("> ")
        yield program
    finally:
        program.close()


def last_message(server: ScriptedServer) -> str:
    return str(server.requests[-1]["messages"][-1]["content"])


def test_a_paste_and_lines_that_go_on_are_one_message(chat: TerminalProgram, server: ScriptedServer) -> None:
    chat.type(f"{PASTE}def f():\r    return 1\r\r/quit{PASTE_END}")
    chat.type(" # why?\r")
    chat.wait_for("> ")
    assert last_message(server) == "def f():\n    return 1\n\n/quit # why?"
    chat.type("one\x1b\rtwo\r")
    chat.wait_for("> ")
    assert last_message(server) == "one\ntwo"
    chat.type("three\\\rfour\r")
    chat.wait_for("> ")
    assert last_message(server) == "three\nfour"
    chat.type('"""five\r  six\r/quit"""\r')
    chat.wait_for("> ")
    assert last_message(server) == "five\n  six\n/quit"
    assert len(server.requests) == 4
    chat.type(CTRL_D)
    assert chat.ended() == 0


def test_words_wrap_markdown_is_shown_and_control_codes_are_not(chat: TerminalProgram, server: ScriptedServer) -> None:
    words = " ".join(f"word{number:02}" for number in range(20))
    server.answer = [*words, "\n\n", "**bo", "ld**\n", "\x1b]0;owned\x07\x1b[2J\x9b31mred\n", "日本" * 40]
    chat.type("hi\r")
    shown = chat.wait_for("first after")
    lines = shown.splitlines()
    assert f"word{7:02}" in lines[1] + lines[2]
    assert all(len(line) <= 60 for line in lines)
    assert " ".join(line for line in lines if line.startswith("word")) == words
    assert "bold" in lines
    assert "\x1b[1mbold\x1b[0m" in chat.output
    assert "\x1b]0;" not in chat.output
    assert "\x1b[2J" not in chat.output
    assert "\x07" not in chat.output
    assert "]0;owned[2J31mred" in shown
    assert [len(line) for line in lines if line.startswith("日")] == [30, 30, 20]  # two columns each
    chat.resize(30)
    server.answer = [words]
    chat.wait_for("> ")
    chat.type("again\r")
    narrow = [line for line in chat.wait_for("first after").splitlines() if line.startswith("word")]
    assert max(map(len, narrow)) <= 30
    assert " ".join(narrow) == words


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(chat: TerminalProgram, server: ScriptedServer) -> None:
    server.answer = ["never ends, ", None]
    chat.type("go\r")
    chat.wait_for("never ends,")
    chat.interrupt()
    assert "…" in chat.wait_for("> ")
    server.answer = ["second"]
    chat.type("and now?\r")
    chat.wait_for("second")
    roles = [(message["role"], message["content"]) for message in server.requests[-1]["messages"]]
    assert roles == [("user", "go"), ("assistant", "never ends, "), ("user", "and now?")]
    chat.wait_for("> ")
    chat.type("half a message")
    chat.wait_for("half a message")
    chat.interrupt()
    chat.wait_for("> ")
    chat.interrupt()
    chat.wait_for("To leave, press Ctrl-C again or Ctrl-D, or type /quit.")
    chat.wait_for("> ")
    chat.interrupt()
    assert chat.ended() == 0
    assert len(server.requests) == 2
    assert "Traceback" not in chat.output


def test_commands_and_their_errors(chat: TerminalProgram, server: ScriptedServer, tmp_path: Path) -> None:
    def command(line: str) -> str:
        chat.type(f"{line}\r")
        return chat.wait_for("\n> ")

    assert "did you mean temperature?" in command("/set temprature 1")
    assert "temperature: must be a number" in command("/set temperature hot")
    assert "top_p: must be a number above 0 and at most 1, got 7" in command("/set top-p 7")
    assert "max_tokens: 7" in command("/set num_predict 7")
    assert "temperature: 0.5" in command("/set parameter temperature 0.5")
    assert "seed: 3" in command("/set seed 3")
    assert "did you mean /system?" in command("/sistem")
    command("/system Be brief.")
    command("/etc/passwd holds what?")
    assert last_message(server) == "/etc/passwd holds what?"
    first = server.requests[-1]
    assert (first["temperature"], first["max_tokens"], first["seed"]) == (0.5, 7, 3)
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    command("/retry")
    again = server.requests[-1]
    assert again["messages"] == first["messages"]
    assert again["seed"] != 3
    saved = tmp_path / "talk.json"
    assert "Saved 1 question" in command(f"/save {saved}")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert "Forgotten: /etc/passwd holds what?" in command("/undo")
    assert "nothing to undo" in command("/undo")
    assert "seed: the server's" in command("/set seed default")
    assert "Loaded 1 question." in command(f"/load {saved}")
    assert "seed: 3" in command("/set seed")
    command("more")
    assert [message["role"] for message in server.requests[-1]["messages"]] == ["system", "user", "assistant", "user"]
    other = tmp_path / "other.json"
    other.write_text("precious")
    assert "is no conversation" in command(f"/save {other}")
    assert other.read_text() == "precious"
    chat.type("/quit\r")
    assert chat.ended() == 0
    assert "Traceback" not in chat.output


def test_history_is_kept_between_conversations_in_a_private_file(server: ScriptedServer, state: Path) -> None:
    server.answer, server.requests = ["Yes."], []

    def talk(*keys: str, options: tuple[str, ...] = ()) -> None:
        program = TerminalProgram("chat", "--url", server.url, *options, XDG_STATE_HOME=str(state))
        for each in keys:
            program.wait_for("> ")
            program.type(each)
        program.wait_for("Yes.")
        program.wait_for("> ")
        program.type(CTRL_D)
        assert program.ended() == 0
        program.close()

    talk(f"{PASTE}first\rmessage{PASTE_END}\r")
    [file] = state.rglob("*.jsonl")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text()) == "first\nmessage"
    talk(f"{UP}\r")
    assert last_message(server) == "first\nmessage"
    talk(" secret\r")
    talk("not kept\r", options=("--no-history",))
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert entries == ["first\nmessage", "first\nmessage"]


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_a_terminal_without_styles_gets_none(server: ScriptedServer, state: Path, variables: dict[str, str]) -> None:
    server.answer = [{"reasoning_content": "let me think"}, "**bold** and `code`"]
    program = TerminalProgram(
        "run", "--url", server.url, "-q", "scripted", "hi", XDG_STATE_HOME=str(state), **variables
    )
    assert program.ended() == 0
    assert program.output == "Reasoning:\r\nlet me think\r\n\r\nAnswer:\r\n**bold** and `code`\r\n"
    program.close()


def test_reasoning_is_dimmed_hidden_or_off(chat: TerminalProgram, server: ScriptedServer) -> None:
    server.answer = [{"reasoning": "thought"}, "answer"]
    chat.type("hi\r")
    chat.wait_for("answer")
    assert "\x1b[2mthought\x1b[0m" in chat.output
    chat.wait_for("> ")
    chat.type("/set reasoning hide\r")
    chat.wait_for("\n> ")
    chat.type("hi\r")
    assert "thought" not in chat.wait_for("answer")
    chat.wait_for("> ")
    chat.type("/set reasoning off\r")
    chat.wait_for("\n> ")
    chat.type("hi\r")
    chat.wait_for("answer")
    assert server.requests[-1]["reasoning_effort"] == "none"
    assert "reasoning_effort" not in server.requests[0]
    assert server.requests[-1]["messages"][1] == {"role": "assistant", "content": "answer"}


@pytest.mark.parametrize("missing", ["readline", "paste"])
def test_without_bracketed_paste_lines_that_arrive_together_are_one_message(
    server: ScriptedServer, state: Path, tmp_path: Path, missing: str
) -> None:
    server.answer, server.requests = ["Yes."], []
    variables = {"TERM": "dumb", "XDG_STATE_HOME": str(state)}
    if missing == "readline":
        (tmp_path / "readline.py").write_text("raise ImportError")
        variables["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    program = TerminalProgram("chat", "--url", server.url, **variables)
    program.wait_for("> ")
    program.type("one\n  two\nthree\n")
    program.wait_for("first after")
    assert [request["messages"][-1]["content"] for request in server.requests] == ["one\n  two\nthree"]
    program.wait_for("> ")
    program.type(CTRL_D)
    assert program.ended() == 0
    program.close()


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> str:
    reply = "<think>Let me consider.</think>\n\nIt **goes** up."
    return str(write_scripted_checkpoint(tmp_path_factory.mktemp("reasoner"), [reply], positions=4096))


def test_a_model_that_reasons_in_a_pipe_and_on_a_terminal(reasoner: str, state: Path) -> None:
    options = ["--reasoning-parser", "think", "--device", "cpu", "--kv-memory", "16MiB"]
    piped = run("run", reasoner, "what", "is it?", *options, stdin="a lift\n")
    assert (piped.exit_code, piped.stdout, piped.stderr) == (0, "It **goes** up.\n", "")
    refused = run("run", reasoner, "what?", "--reasoning", "off", *options)
    assert refused.exit_code == 2
    assert "error: --reasoning: this model always reasons" in refused.stderr
    program = TerminalProgram("run", reasoner, "what?", *options, XDG_STATE_HOME=str(state))
    assert program.ended() == 0
    assert "Let me consider.\n\nIt goes up.\n" in program.shown
    assert program.output.index("\x1b[2mL") < program.output.index("\x1b[1mg")
    program.close()


def test_the_prompt_is_what_is_piped_and_the_words(server: ScriptedServer) -> None:
    def asked(*words: str, stdin: str = "") -> str:
        result = run("run", *words, "--url", server.url, stdin=stdin)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "Fine.\n", ""), result.output
        return last_message(server)

    server.answer = ["Fine."]
    assert asked("scripted", "two", "words") == "two words"
    assert server.requests[-1]["model"] == "scripted"
    assert asked("scripted", "summarise", stdin="a text\nof lines\n\n") == "a text\nof lines\n\nsummarise"
    assert asked("scripted", stdin="a text\n") == "a text"
    assert asked("--model", "other", "all", "prompt") == "all prompt"
    assert server.requests[-1]["model"] == "other"
    for arguments, problem in (
        (["what is it?"], "'what is it?' is not a model; write `chairlift run MODEL PROMPT`"),
        (["scripted"], "prompt: is empty"),
        (["scripted", " "], "prompt: is empty"),
        (["scripted", "hi", "--reasoning", "loud"], "--reasoning: unknown 'loud'"),
    ):
        result = run("run", *arguments, "--url", server.url)
        assert result.exit_code == 2
        assert problem in result.stderr
        assert result.stderr.count("\n") == 1


def test_the_keyboard_may_be_a_terminal_where_the_output_is_none(server: ScriptedServer, state: Path) -> None:
    server.answer = ["**Fine.**"]
    program = TerminalProgram("chat", "-q", "--url", server.url, piped=True, XDG_STATE_HOME=str(state))
    program.wait_for("> ")
    program.type("hi\n")
    program.wait_for("> ")
    program.type(CTRL_D)
    assert program.process.stdout is not None
    assert program.process.stdout.read() == b"**Fine.**\n"
    assert program.ended() == 0
    program.close()


@pytest.mark.model
def test_the_default_model_answers_in_one_line_of_a_shell() -> None:
    result = run("run", "smollm2-135m", "What is 2 + 2?", "--temperature", "0")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "4" in result.stdout
