"""`chairlift chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.cli_console import AnswerMeter, StopKey, note, show_error, write_text
from chairlift.cli_options import EngineOptions, SamplingOptions, with_option_groups
from chairlift.core.sampling import SamplingParams
from chairlift.errors import ChairliftError, EngineDead, InvalidParameter

if TYPE_CHECKING:
    from chairlift.llm import LLM

HELP = """\
/help         this
/reset        forget the conversation
/system TEXT  tell the model how to behave; without TEXT, take that back
/quit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


@with_option_groups
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[str, typer.Option(help="Tell the model how to behave.", show_default="nothing")] = "",
) -> None:
    """Talk to a model, with /help on what can be typed there.

    The line under each answer shows how much of the conversation was still
    in the cache: only what is new has to be computed. When standard input is
    not a terminal, every line of it is a message, or a command with its slash.
    """
    params = sampling.params()
    llm = engine.load()
    if llm.get_tokenizer().chat_template is None:
        raise InvalidParameter("model", "it has no chat template, so it cannot chat; use `chairlift generate`")
    conversation = Conversation(llm, params, system=system, show_figures=not engine.quiet)
    interactive = sys.stdin.isatty()
    if interactive:
        note("Type a message, or /help.")
    for line in _typed_lines() if interactive else _piped_lines():
        if line == "/quit":
            break
        if line.startswith("/"):
            conversation.command(line)
        elif line:
            _answer(conversation, line, interactive)


def _typed_lines() -> Iterator[str]:
    with suppress(ImportError):  # not every Python has it
        import readline  # noqa: F401 (importing it gives `input` editing and history)

    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            write_text("\n")
            return


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line.strip()
    except UnicodeDecodeError as error:
        raise InvalidParameter("prompt", f"standard input is not UTF-8 text ({error.reason})") from None


def _answer(conversation: Conversation, message: str, interactive: bool) -> None:
    try:
        conversation.ask(message)
    except EngineDead:
        raise
    except ChairliftError as error:
        if not interactive:
            raise
        show_error(f"{error}; /reset starts anew")


class Conversation:
    """What was said so far, and the model that answers."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str, show_figures: bool) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._show_figures = show_figures
        self._turns: list[dict[str, str]] = []
        self._meter = AnswerMeter()
        self._stop_key = StopKey()
        llm.engine.subscribe(self._meter)
        llm.engine.subscribe(self._stop_key)

    def command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        match name:
            case "/help":
                note(HELP)
            case "/reset":
                self._turns.clear()
                note("The conversation starts anew.")
            case "/system":
                self._system = text.strip()
                note(f"System message: {self._system}" if self._system else "No system message.")
            case _:
                note(f"There is no {name}; /help lists what there is.")

    def ask(self, message: str) -> None:
        """Print the answer as it comes and remember both; an answer that was stopped is remembered as far as it got."""
        question = {"role": "user", "content": message}
        messages = [*self._system_message(), *self._turns, question]
        pieces: list[str] = []
        try:
            with self._stop_key.armed():
                for piece in self._llm.stream_chat(messages, self._params):
                    pieces.append(piece.text)
                    write_text(piece.text)
        except KeyboardInterrupt:
            write_text(" …")
        write_text("\n")
        if pieces:  # stopped before the first one, it is as if it had not been asked
            self._turns += [question, {"role": "assistant", "content": "".join(pieces)}]
        if self._show_figures:
            note(self._meter.summary())
        self._meter.check()

    def _system_message(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []
