"""`chairlift chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from chairlift.cli.app import RUN, app
from chairlift.client.blocking import BlockingClient
from chairlift.client.http import Address
from chairlift.errors import ChairliftError, EngineDead, InvalidParameter
from chairlift.terminal.answers import AnswerMeter, InterruptBetweenSteps, answer_summary, no_echo
from chairlift.terminal.console import note, show_error, write_text
from chairlift.terminal.option_groups import left_out
from chairlift.terminal.options import EngineOptions, SamplingOptions, given, refuse_engine_options

if TYPE_CHECKING:
    from chairlift.llm import LLM


_SERVER = "Server"
HELP = """\
/help         show this
/reset        start a new conversation
/system TEXT  set the system message; without TEXT, remove it
/quit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


@app.command(
    group=RUN,
    examples=[
        "chairlift chat",
        'chairlift chat --model Qwen/Qwen3-0.6B --system "Answer in one sentence."',
        'echo "What is a chairlift?" | chairlift chat --quiet --temperature 0',
        "chairlift chat --url http://localhost:8000",
    ],
)
def chat(
    context: typer.Context,
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[str, typer.Option(help="System message.", show_default="none")] = "",
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to this OpenAI-compatible server instead of running a model here.",
            rich_help_panel=_SERVER,
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The key for --url.", envvar="CHAIRLIFT_API_KEY", rich_help_panel=_SERVER)
    ] = None,
) -> None:
    """Talk to a model; /help lists the commands of the conversation.

    The line below each answer shows how much of the conversation was cached:
    only the new part is computed. If standard input is not a terminal, each of
    its lines is a message, or a command with its slash. With --url, --model is
    the model's name there, by default the first one. Sampling options that are
    not given are those that the model recommends, if it does, or the server's.
    """
    sampling.params()  # check the parameters before the model is loaded
    backend = (
        _local_chat(context, engine, sampling) if url is None else _remote_chat(context, engine, sampling, url, api_key)
    )
    session = ChatSession(backend, system=system, show_figures=not engine.quiet)
    interactive = sys.stdin.isatty()
    if interactive:
        note("Type a message, or /help.")
    for line in _typed_lines() if interactive else _piped_lines():
        if line == "/quit":
            break
        if line.startswith("/"):
            session.command(line)
        elif line:
            with no_echo():
                _answer(session, line, interactive)


def _local_chat(context: typer.Context, engine: EngineOptions, sampling: SamplingOptions) -> ChatBackend:
    llm = engine.load()
    if llm.get_tokenizer().chat_template is None:
        raise InvalidParameter("model", "it has no chat template, so it cannot chat; use `chairlift generate`")
    return LocalChat(llm, sampling.suited_to(llm.default_sampling, context))


def _remote_chat(
    context: typer.Context, engine: EngineOptions, sampling: SamplingOptions, url: str, api_key: str | None
) -> ChatBackend:
    refuse_engine_options(context)
    client = BlockingClient(Address.parse(url), api_key=api_key)
    model = engine.model if given(context, "model") else str(client.served_model()["id"])
    if not engine.quiet:
        note(f"{model} at {client.address}")
    fields = {name: value for name, value in asdict(sampling).items() if not left_out(context, name)}
    return RemoteChat(client, model, fields | {"max_tokens": sampling.max_tokens})


def _typed_lines() -> Iterator[str]:
    with suppress(ImportError):  # Not every Python build has it.
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


def _answer(session: ChatSession, message: str, interactive: bool) -> None:
    try:
        session.send(message)
    except EngineDead:
        raise
    except ChairliftError as error:
        if not interactive:
            raise
        show_error(f"{error}; /reset starts a new conversation")


class ChatSession:
    """A conversation: its messages and its backend."""

    def __init__(self, backend: ChatBackend, *, system: str, show_figures: bool) -> None:
        self._backend = backend
        self._system = system
        self._show_figures = show_figures
        self._messages: list[dict[str, str]] = []

    def command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        match name:
            case "/help":
                note(HELP)
            case "/reset":
                self._messages.clear()
                note("New conversation.")
            case "/system":
                self._system = text.strip()
                note(f"System message: {self._system}" if self._system else "No system message.")
            case _:
                note(f"There is no {name}; /help lists the commands.")

    def send(self, message: str) -> None:
        """Print the answer as it arrives and keep both messages, also of an interrupted answer."""
        question = {"role": "user", "content": message}
        pieces: list[str] = []
        answer = self._backend.answer([*self._system_message(), *self._messages, question])
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
            if pieces:  # The message is dropped too if there is no text.
                self._messages += [question, {"role": "assistant", "content": "".join(pieces)}]
        if self._show_figures:
            note(self._backend.summary())

    def _system_message(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self._system}] if self._system else []


Messages = Sequence[Mapping[str, str]]


class ChatBackend(Protocol):
    def answer(self, messages: Messages) -> Generator[str, None, None]:
        """Yield pieces of text as they arrive. Ctrl-C raises KeyboardInterrupt between two pieces."""
        ...

    def summary(self) -> str:
        """Return one line with the speed and lengths of the last answer."""
        ...


class LocalChat:
    """Runs a model in this process."""

    def __init__(self, llm: LLM, sampling: SamplingOptions) -> None:
        self._llm = llm
        self._params = sampling.params()
        self._meter = AnswerMeter()
        self._interrupt = InterruptBetweenSteps()
        llm.engine.subscribe(self._meter)
        llm.engine.subscribe(self._interrupt)

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        with self._interrupt.armed():
            for piece in self._llm.stream_chat(messages, self._params):
                yield piece.text
        self._meter.check()

    def summary(self) -> str:
        return self._meter.summary()


class RemoteChat:
    """Calls an OpenAI-compatible server."""

    def __init__(self, client: BlockingClient, model: str, sampling: Mapping[str, Any]) -> None:
        """`sampling` are the parameters to send; the server decides about the others."""
        self._client = client
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._fields |= sampling
        self._sent_at = 0.0
        self._times: list[float] = []
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        self._sent_at, self._times, self._usage, self._finish_reason = time.monotonic(), [], {}, None
        for event in self._client.stream("/v1/chat/completions", {**self._fields, "messages": list(messages)}):
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                text = (choice.get("delta") or {}).get("content")
                if text:
                    self._times.append(time.monotonic())
                    yield text

    def summary(self) -> str:
        details = self._usage.get("prompt_tokens_details") or {}
        return answer_summary(
            self._sent_at,
            self._times,
            self._usage.get("completion_tokens") or len(self._times),
            self._usage.get("prompt_tokens"),
            details.get("cached_tokens") or 0,
            cut_off=self._finish_reason == "length",
        )
