"""`chairlift serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from chairlift.cli.app import RUN, app
from chairlift.progress import LOG_SECONDS, StageDisplay, StartStage
from chairlift.server.options import ServerOptions
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions

if TYPE_CHECKING:
    from chairlift.server.config import ServerConfig
    from chairlift.server.wire.messages import Loaded, Loading


@app.command(
    group=RUN,
    examples=[
        "chairlift serve",
        "chairlift serve Qwen/Qwen3-0.6B --port 8080 --max-batch-requests 128",
        "chairlift serve --config server.yaml",
        "CHAIRLIFT_API_KEY=secret chairlift serve --host 0.0.0.0",
    ],
)
def serve(server: ServerOptions, engine: EngineOptions) -> None:
    """Serve a model to OpenAI clients.

    SIGTERM or Ctrl-C refuses new requests, lets running ones finish, and exits;
    a second one exits at once.
    """
    from chairlift.server.config import server_config
    from chairlift.server.lifecycle import ServerEvents, serve_forever

    config = server_config(server, engine.model, engine.config(), quiet=engine.quiet, verbose=engine.verbose)

    class Shown(ServerLife, ServerEvents):
        """Also has the type that the server wants."""

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("chairlift").setLevel(config.log_level.upper())
    status = asyncio.run(serve_forever(config, ServerEvents() if engine.quiet else Shown(config)))
    if status:
        raise typer.Exit(status)


LINE_SECONDS = 1.0  # Lines about running requests are this far apart on a terminal.
_TRIED = {
    "chat/completions": {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 200},
    "completions": {"prompt": "The sky is blue because", "max_tokens": 32},
    "embeddings": {"input": "Why is the sky blue?"},
}


class ServerLife:
    """Prints the progress of the start, how to reach the server, and what its end waits for."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        # Bars would mix with the engine's own lines.
        self._display = StageDisplay(note, bars=config.engine_log_level == "warning")
        self._waiting_for = 0
        self._said_at = float("-inf")

    def loading(self, stage: Loading) -> None:
        self._display(StartStage(stage.stage, stage.done, stage.total))

    def ready(self, address: str, loaded: Loaded) -> None:
        self._display.close()
        for line in banner(self._config, address, loaded):
            with suppress(SystemExit):  # a server that cannot print this can still serve
                note(line, style="")

    def draining(self, running: int) -> None:
        now = time.monotonic()
        pause = LINE_SECONDS if sys.stderr.isatty() else LOG_SECONDS
        if running and running != self._waiting_for and now - self._said_at > pause:
            self._waiting_for, self._said_at = running, now
            waits = f"waiting up to {self._config.drain_timeout:g} s; Ctrl-C again stops at once"
            self._say(f"{_requests(running)} running; {waits}")

    def ended(self, running: int) -> None:
        if self._waiting_for or running:
            self._say(f"Stopped; {_requests(running)} cut off." if running else "Stopped; all requests are answered.")
        elif sys.stderr.isatty():
            self._say("Stopped.")

    def _say(self, text: str) -> None:
        self._display.close()
        if sys.stderr.isatty():
            sys.stderr.write("\r")  # over the ^C that the terminal shows
        note(text, style="")


def _requests(count: int) -> str:
    return "1 request is" if count == 1 else f"{count:,} requests are"


def banner(config: ServerConfig, address: str, loaded: Loaded) -> list[str]:
    """At most five lines: the model, where it is served, and a request to try."""
    if address.startswith("unix:"):
        url, how = "http://localhost", f"--unix-socket {shlex.quote(address.removeprefix('unix:'))} "
    else:
        url, how = _reachable(address), "-k " if address.startswith("https:") else ""
    endpoint = loaded.endpoint or "chat/completions"
    headers = "-H 'Content-Type: application/json'"
    if config.keys:
        headers += ' -H "Authorization: Bearer $CHAIRLIFT_API_KEY"'
    described = f" ({loaded.described})" if loaded.described else ""
    lines = [f"Serving {config.model_name}{described} at {address}"]
    if config.dashboard and not address.startswith("unix:"):
        lines.append(f"Dashboard: {url}/dashboard")
    body = json.dumps(_TRIED[endpoint])
    return [*lines, f"curl {how}{url}/v1/{endpoint} \\", f"  {headers} \\", f"  -d {shlex.quote(body)}"]


def _reachable(address: str) -> str:
    """The address with which this machine reaches a server that listens on all of its addresses."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
