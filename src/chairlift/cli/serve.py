"""`chairlift serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from chairlift.cli.app import RUN, app
from chairlift.errors import InvalidParameter
from chairlift.server.options import ServerOptions
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions, ModelArgument

if TYPE_CHECKING:
    from chairlift.server.lifecycle import ServerConfig
    from chairlift.server.service import Service


@app.command(
    group=RUN,
    examples=[
        "chairlift serve",
        "chairlift serve Qwen/Qwen3-0.6B --port 8080 --max-batch-requests 128",
        "chairlift serve --config server.yaml",
        "CHAIRLIFT_API_KEY=secret chairlift serve --host 0.0.0.0",
    ],
)
def serve(server: ServerOptions, engine: EngineOptions, model_argument: ModelArgument = None) -> None:
    """Serve a model to OpenAI clients.

    SIGTERM or Ctrl-C refuses new requests, lets running ones finish, and exits;
    a second one exits at once.
    """
    from chairlift.server.lifecycle import serve_forever

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    config = _server_config(server, engine, model_argument or engine.model)

    def greet(service: Service, port: int) -> None:
        _print_address(f"http://{server.host}:{port}", service.model.name, config.api_keys)

    status = asyncio.run(serve_forever(config, greet))
    if status:
        raise typer.Exit(status)


def _server_config(server: ServerOptions, engine: EngineOptions, model: str) -> ServerConfig:
    from chairlift.server.lifecycle import ServerConfig
    from chairlift.server.limits import Limits
    from chairlift.server.process.engine_client import Supervision

    keys = _api_keys(server.api_key or (), server.api_key_file)
    if server.isolate_keys and not keys:
        raise InvalidParameter("isolate_keys", "needs API keys; give some with --api-key")
    return ServerConfig(
        model=model,
        served_name=server.served_model_name,
        engine=engine.config(),
        host=server.host,
        port=server.port,
        api_keys=keys,
        isolate_keys=server.isolate_keys,
        cors_origins=server.cors_origin or (),
        allowed_hosts=server.allowed_host or (),
        drain_timeout=server.drain_timeout,
        limits=Limits(max_waiting=server.max_waiting, default_timeout=server.request_timeout),
        supervision=Supervision(heartbeat_timeout=server.heartbeat_timeout, step_timeout=server.step_timeout),
        tool_format=server.tool_format,
        dashboard=server.dashboard,
        public_metrics=server.public_metrics,
        policy_switch=server.policy_switch,
        quiet=engine.quiet,
    )


def _api_keys(given: Sequence[str], file: Path | None) -> list[str]:
    keys = [*given]
    if "CHAIRLIFT_API_KEY" in os.environ:  # an empty key is an error and must not open the server
        keys.append(os.environ["CHAIRLIFT_API_KEY"])
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise InvalidParameter("api_key_file", f"cannot be read: {error.strerror}") from None
    if any(not key.isascii() or not key.strip() for key in keys):
        raise InvalidParameter("api_key", "must be non-empty ASCII")
    return keys


def _print_address(address: str, model: str, keys: Sequence[str]) -> None:
    """Print where the server listens and a request to try."""
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if keys else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a chairlift?"}}]}}'
    note(f"Serving {model} at {address}. Try:\n")
    typer.echo(f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\\n  -d '{body}'\n")
    sys.stdout.flush()
