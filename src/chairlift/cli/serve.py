"""`chairlift serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import suppress

import typer

from chairlift.cli.app import RUN, app
from chairlift.server.options import ServerOptions
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions


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
    from chairlift.server.lifecycle import serve_forever

    config = server_config(server, engine.model, engine.config(), quiet=engine.quiet)

    def greet(model: str, address: str) -> None:
        _print_address(address, model, with_keys=bool(config.keys))

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("chairlift").setLevel(config.log_level.upper())
    status = asyncio.run(serve_forever(config, greet))
    if status:
        raise typer.Exit(status)


def _print_address(address: str, model: str, *, with_keys: bool) -> None:
    """Print where the server listens and a request to try."""
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if with_keys else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a chairlift?"}}]}}'
    note(f"Serving {model} at {address}. Try:\n")
    if address.startswith("unix:"):
        address = f"--unix-socket {address.removeprefix('unix:')} http://localhost"
    with suppress(SystemExit):  # a server that cannot print this can still serve
        typer.echo(f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\\n  -d '{body}'\n")
        sys.stdout.flush()
