"""`chairlift serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.errors import InvalidParameter
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions, ModelArgument, with_option_groups

if TYPE_CHECKING:
    from chairlift.server.service import Service

_SERVER = "Server"


@with_option_groups
def serve(
    engine: EngineOptions,
    model_argument: ModelArgument = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets others in.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535, rich_help_panel=_SERVER)] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Name of the model to clients.", rich_help_panel=_SERVER, show_default="its own name"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Require this key, or 'NAME KEY'; may be given several times. Also read from CHAIRLIFT_API_KEY.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Require one of the keys in this file, one per line.", rich_help_panel=_SERVER)
    ] = None,
    isolate_keys: Annotated[
        bool,
        typer.Option("--isolate-keys", help="Never share cached prefixes between API keys.", rich_help_panel=_SERVER),
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Let web pages of this origin call the server; may be given several times, '*' is all.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Answer under this name too, where there are no API keys; may be given several times, '*' is all. "
            "Addresses and this machine's own names always work.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_waiting: Annotated[
        int,
        typer.Option(help="Completions that may wait for a seat; more get 429.", min=0, rich_help_panel=_SERVER),
    ] = 256,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a request ends.", min=0.001, rich_help_panel=_SERVER, show_default="never"
        ),
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3_json, mistral or json.",
            rich_help_panel=_SERVER,
            show_default="as its chat template shows",
        ),
    ] = None,
    dashboard: Annotated[
        bool,
        typer.Option("--dashboard/--no-dashboard", help="The live page at /dashboard.", rich_help_panel=_SERVER),
    ] = True,
    policy_switch: Annotated[
        bool | None,
        typer.Option(
            "--policy-switch/--no-policy-switch",
            help="Let the dashboard change the batching policy of the running engine.",
            rich_help_panel=_SERVER,
            show_default="if only this machine can reach the server",
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get at shutdown.", min=0, rich_help_panel=_SERVER)
    ] = 30.0,
    step_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds in one step after which the engine counts as hung and is restarted.",
            min=0.1,
            rich_help_panel=_SERVER,
        ),
    ] = 300.0,
    heartbeat_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds of silence after which the engine counts as dead and is restarted.",
            min=1.0,
            rich_help_panel=_SERVER,
        ),
    ] = 10.0,
) -> None:
    """Serve a model to OpenAI clients.

    SIGTERM or Ctrl-C takes no new requests, lets running ones finish, and exits; a second one exits
    at once.
    """
    from chairlift.server.lifecycle import ServerConfig, serve_forever
    from chairlift.server.limits import Limits
    from chairlift.server.process.engine_client import Supervision

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    keys = _api_keys(api_key or [], api_key_file)
    if isolate_keys and not keys:
        raise InvalidParameter("isolate_keys", "needs API keys; give some with --api-key")
    config = ServerConfig(
        model=model_argument or engine.model,
        served_name=served_model_name,
        engine=engine.config(),
        host=host,
        port=port,
        api_keys=keys,
        isolate_keys=isolate_keys,
        cors_origins=cors_origin or [],
        allowed_hosts=allowed_host or [],
        drain_timeout=drain_timeout,
        limits=Limits(max_waiting=max_waiting, default_timeout=request_timeout),
        supervision=Supervision(heartbeat_timeout=heartbeat_timeout, step_timeout=step_timeout),
        tool_format=tool_format,
        dashboard=dashboard,
        policy_switch=policy_switch,
        quiet=engine.quiet,
    )

    def greet(service: Service, actual_port: int) -> None:
        _greet(f"http://{host}:{actual_port}", service.model_name, config.api_keys)

    status = asyncio.run(serve_forever(config, greet))
    if status:
        raise typer.Exit(status)


def _api_keys(given: list[str], file: Path | None) -> list[str]:
    keys = [*given]
    if "CHAIRLIFT_API_KEY" in os.environ:  # an empty one is a mistake, not a wish for an open server
        keys.append(os.environ["CHAIRLIFT_API_KEY"])
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise InvalidParameter("api_key_file", f"cannot be read: {error.strerror}") from None
    if any(not key.isascii() or not key.strip() for key in keys):
        raise InvalidParameter("api_key", "must be non-empty ASCII")
    return keys


def _greet(address: str, model: str, keys: Sequence[str]) -> None:
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if keys else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a chairlift?"}}]}}'
    note(f"Serving {model} at {address}. Try:\n")
    typer.echo(f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\\n  -d '{body}'\n")
    sys.stdout.flush()
