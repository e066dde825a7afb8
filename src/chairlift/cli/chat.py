"""`chairlift run` and `chairlift chat`: an answer or a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import typer

from chairlift.cli.app import RUN, app
from chairlift.cli.chat_backends import ChatBackend, LocalChat, RemoteChat
from chairlift.cli.conversation import Conversation, QuitChat
from chairlift.client.blocking import BlockingClient
from chairlift.client.http import Address
from chairlift.errors import ChairliftError, EngineDead, InvalidParameter
from chairlift.terminal.answers import no_echo
from chairlift.terminal.console import note, show_error
from chairlift.terminal.message_input import History, LeaveChat, MessageReader
from chairlift.terminal.option_groups import source_of
from chairlift.terminal.options import (
    ChatOptions,
    ChatSampling,
    EngineOptions,
    given,
    refuse_engine_options,
)

INTERRUPTED = 130  # the exit status after Ctrl-C

_SERVER = "Server"
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Talk to this OpenAI-compatible server instead of running a model here.",
        rich_help_panel=_SERVER,
        show_default=False,
    ),
]
ServerKey = Annotated[
    str | None,
    typer.Option("--api-key", help="The key for --url.", envvar="CHAIRLIFT_API_KEY", rich_help_panel=_SERVER),
]


@app.command(
    group=RUN,
    examples=[
        'chairlift run smollm2-135m "Why is the sky blue?"',
        'cat notes.txt | chairlift run Qwen/Qwen3-0.6B "Summarise this." > summary.txt',
        "chairlift run smollm2-135m",
        'chairlift run smollm2-135m "Hello" --url http://localhost:8000',
    ],
)
def run(
    context: typer.Context,
    engine: EngineOptions,
    sampling: ChatSampling,
    options: ChatOptions,
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, unless --model names it.", show_default=False)
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="What to answer.", show_default=False)
    ] = None,
    url: ServerUrl = None,
    api_key: ServerKey = None,
) -> None:
    """Answer one prompt; without a prompt, talk to the model as in `chairlift chat`.

    A text that is piped in stands before the prompt. Only the answer goes to
    standard output. A model without a chat template completes the prompt.
    With --model, all arguments are the prompt.
    """
    prompt = list(words or [])
    named = name is not None or given(context, "model")
    if name is not None and source_of(context, "model") == "COMMANDLINE":
        prompt.insert(0, name)
    elif name is not None:
        engine = replace(engine, model=_checked_name(name))
    text = _prompt(prompt)
    conversation = _start(context, engine, sampling, options, url, api_key, named=named, prompt=text)
    if text is None:
        _talk(conversation, options)
        return
    with no_echo():
        finished = conversation.send(text)
    if not finished:
        raise typer.Exit(INTERRUPTED)


@app.command(
    group=RUN,
    examples=[
        "chairlift chat",
        'chairlift chat Qwen/Qwen3-0.6B --system "Answer in one sentence."',
        'echo "Why is the sky blue?" | chairlift chat --quiet --temperature 0',
        "chairlift chat --url http://localhost:8000",
    ],
)
def chat(
    context: typer.Context,
    engine: EngineOptions,
    sampling: ChatSampling,
    options: ChatOptions,
    url: ServerUrl = None,
    api_key: ServerKey = None,
) -> None:
    """Talk to a model; /help lists the commands of the conversation.

    A pasted text is one message, Alt-Enter begins a new line. The line below each
    answer shows how much of the conversation was cached: only the new part is
    computed. If standard input is not a terminal, each of its lines is a message,
    or a command with its slash. With --url, MODEL is the model's name there, by
    default the first one. Sampling options that are not given are those that the
    model recommends, if it does, or the server's.
    """
    named = given(context, "model")
    _talk(_start(context, engine, sampling, options, url, api_key, named=named, prompt=None), options)


def _checked_name(name: str) -> str:
    """Return the name of a model; raises for a prompt in its place."""
    if " " in name and not os.path.exists(name):
        raise InvalidParameter("model", f"{name!r:.60} is not a model; write `chairlift run MODEL PROMPT`")
    return name


def _prompt(words: list[str]) -> str | None:
    """Return what is to be answered: the piped text, then the words; None if the user is to be asked."""
    piped = "" if sys.stdin.isatty() else "".join(_piped_lines(keep_ends=True)).strip("\n")
    text = "\n\n".join(part for part in (piped, " ".join(words)) if part.strip())
    if not text and (words or not sys.stdin.isatty()):
        raise InvalidParameter("prompt", "is empty; give one, or pipe one in")
    return text or None


def _start(
    context: typer.Context,
    engine: EngineOptions,
    sampling: ChatSampling,
    options: ChatOptions,
    url: str | None,
    api_key: str | None,
    *,
    named: bool,
    prompt: str | None,
) -> Conversation:
    """Load the model or ask the server. With a prompt, nothing but the answer is shown, and no template is needed."""
    sampling.params()  # check the parameters before the model is loaded
    changed = sampling.given(context)
    backend: ChatBackend
    if url is not None:
        refuse_engine_options(context)
        client = BlockingClient(Address.parse(url), api_key=api_key)
        backend = RemoteChat(client, engine.model if named else str(client.served_model()["id"]))
        if not engine.quiet and prompt is None:
            note(f"{backend.model} at {client.address}")
    else:
        engine.check_preset(sampling.preset)
        llm = engine.load()
        backend = LocalChat(llm, engine.model)
        if prompt is None and not backend.chats:
            problem = f"it has no chat template, so it cannot chat; use `chairlift run {engine.model} PROMPT`"
            raise InvalidParameter("model", problem)
    show_figures = prompt is None or (sys.stdout.isatty() and sys.stderr.isatty())
    return Conversation(backend, options, changed, quiet=engine.quiet, show_figures=show_figures)


def _talk(conversation: Conversation, options: ChatOptions) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        note("Type a message, or /help.")
    try:
        for text in _typed(conversation, options) if interactive else _piped_lines():
            if text.strip():
                _handle(conversation, text, interactive)
    except (QuitChat, LeaveChat):
        pass


def _handle(conversation: Conversation, text: str, interactive: bool) -> None:
    try:
        with no_echo():
            conversation.handle(text)
    except EngineDead:
        raise
    except ChairliftError as error:
        if not interactive:
            raise
        too_long = isinstance(error, InvalidParameter) and error.parameter in ("prompt", "messages")
        show_error(f"{error}; /undo or /clear makes room" if too_long else str(error))


def _typed(conversation: Conversation, options: ChatOptions) -> Iterator[str]:
    reader = MessageReader(History() if options.history else None, conversation.complete)
    while True:
        yield reader.read()


def _piped_lines(*, keep_ends: bool = False) -> Iterator[str]:
    try:
        for line in sys.stdin:
            yield line if keep_ends else line.strip()
    except UnicodeDecodeError as error:
        raise InvalidParameter("prompt", f"standard input is not UTF-8 text ({error.reason})") from None
