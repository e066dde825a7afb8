"""`chairlift chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Annotated

import typer

from chairlift.cli.chat_backends import OwnModel, ServedModel, Speaker
from chairlift.client.address import Address
from chairlift.client.blocking import BlockingClient
from chairlift.errors import ChairliftError, EngineDead, InvalidParameter
from chairlift.terminal.console import note, show_error, write_text
from chairlift.terminal.options import EngineOptions, SamplingOptions, given, refuse_given, with_option_groups

_SERVER = "Server"
HELP = """\
/help         this
/reset        forget the conversation
/system TEXT  tell the model how to behave; without TEXT, take that back
/quit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


@with_option_groups
def chat(
    context: typer.Context,
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[str, typer.Option(help="Tell the model how to behave.", show_default="nothing")] = "",
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to this OpenAI-compatible server instead of an own engine.",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The key for --url.", envvar="CHAIRLIFT_API_KEY", rich_help_panel=_SERVER)
    ] = None,
) -> None:
    """Talk to a model, with /help on what can be typed there.

    The line under each answer shows how much of the conversation was still
    in the cache: only what is new has to be computed. When standard input is
    not a terminal, every line of it is a message, or a command with its slash.
    With --url, --model is the model's name there, by default the first one.
    """
    sampling.params()  # whatever is wrong with them is said first
    speaker = _own_model(engine, sampling) if url is None else _served_model(context, engine, sampling, url, api_key)
    conversation = Conversation(speaker, system=system, show_figures=not engine.quiet)
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


def _own_model(engine: EngineOptions, sampling: SamplingOptions) -> Speaker:
    llm = engine.load()
    if llm.get_tokenizer().chat_template is None:
        raise InvalidParameter("model", "it has no chat template, so it cannot chat; use `chairlift generate`")
    return OwnModel(llm, sampling)


def _served_model(
    context: typer.Context, engine: EngineOptions, sampling: SamplingOptions, url: str, api_key: str | None
) -> Speaker:
    names = [field.name for field in fields(EngineOptions) if field.name not in ("model", "quiet")]
    refuse_given(context, names, "is for an engine of ours, but --url has its own")
    client = BlockingClient(Address.parse(url), api_key=api_key)
    model = engine.model if given(context, "model") else str(client.served_model()["id"])
    if not engine.quiet:
        note(f"{model} at {client.address}")
    return ServedModel(client, model, sampling)


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
    """What was said so far, and who answers."""

    def __init__(self, speaker: Speaker, *, system: str, show_figures: bool) -> None:
        self._speaker = speaker
        self._system = system
        self._show_figures = show_figures
        self._turns: list[dict[str, str]] = []

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
        answer = self._speaker.answer(messages)
        try:
            for piece in answer:
                pieces.append(piece)
                write_text(piece)
            write_text("\n")
        except KeyboardInterrupt:
            write_text(" …\n")
        except ChairliftError:
            write_text("\n" if pieces else "")
            raise
        finally:
            answer.close()
            if pieces:  # stopped before the first one, it is as if it had not been asked
                self._turns += [question, {"role": "assistant", "content": "".join(pieces)}]
        if self._show_figures:
            note(self._speaker.summary())

    def _system_message(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []
