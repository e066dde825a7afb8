"""`chairlift serve`: the OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING

import typer

from chairlift.byte_sizes import parse_bytes
from chairlift.cli.app import RUN, app
from chairlift.errors import InvalidParameter
from chairlift.server.options import ServerOptions
from chairlift.terminal.console import note
from chairlift.terminal.options import EngineOptions, ModelArgument

if TYPE_CHECKING:
    from chairlift.server.access.keys import KeySources
    from chairlift.server.config import ServerConfig
    from chairlift.server.http.listener import Certificate


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

    config = _server_config(server, engine, model_argument or engine.model)

    def greet(model: str, address: str) -> None:
        _print_address(address, model, with_keys=bool(config.keys))

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("chairlift").setLevel(config.log_level.upper())
    status = asyncio.run(serve_forever(config, greet))
    if status:
        raise typer.Exit(status)


def _server_config(server: ServerOptions, engine: EngineOptions, model: str) -> ServerConfig:
    from chairlift.core.orderings.fair import parse_weights
    from chairlift.server.config import ServerConfig
    from chairlift.server.files.folder import FilesFolder
    from chairlift.server.limits import Limits
    from chairlift.server.process.engine_client import Supervision

    keys = _key_sources(server)
    files_quota = parse_bytes("files_quota", server.files_quota)
    if server.isolate_keys and not keys:
        raise InvalidParameter("isolate_keys", "needs API keys; give some with --api-key")
    if server.files_dir is not None:
        FilesFolder(server.files_dir, files_quota)  # refuses a folder that cannot be written
    return ServerConfig(
        model=model,
        served_names=server.served_model_name or (),
        engine=engine.config(),
        host=server.host,
        port=server.port,
        uds=server.uds,
        certificate=_certificate(server),
        access_log=server.access_log,
        traces_endpoint=server.otlp_traces_endpoint,
        log_level=server.log_level or ("warning" if engine.quiet else "info"),
        chat_template=server.chat_template,
        keys=keys,
        isolate_keys=server.isolate_keys,
        cors_origins=server.cors_origin or (),
        allowed_hosts=server.allowed_host or (),
        files_dir=server.files_dir,
        files_quota=files_quota,
        drain_timeout=server.drain_timeout,
        api_workers=server.api_workers,
        limits=Limits(
            max_waiting=server.max_waiting,
            tenant_weights=parse_weights(engine.config()["tenant_weights"]),
            default_timeout=server.request_timeout,
        ),
        supervision=Supervision(heartbeat_timeout=server.heartbeat_timeout, step_timeout=server.step_timeout),
        tool_format=server.tool_format,
        dashboard=server.dashboard,
        public_metrics=server.public_metrics,
        policy_switch=server.policy_switch,
        quiet=engine.quiet,
    )


def _certificate(server: ServerOptions) -> Certificate | None:
    from chairlift.server.http.listener import Certificate

    if server.ssl_certfile is not None:
        return Certificate(server.ssl_certfile, server.ssl_keyfile)
    if server.ssl_keyfile is not None:
        raise InvalidParameter("ssl_keyfile", "needs a certificate; give it with --ssl-certfile")
    return None


def _key_sources(server: ServerOptions) -> KeySources:
    from chairlift.server.access.keys import KeySources

    texts = [*(server.api_key or ())]
    if "CHAIRLIFT_API_KEY" in os.environ:  # an empty key is an error and must not open the server
        texts.append(os.environ["CHAIRLIFT_API_KEY"])
    sources = KeySources(texts, server.api_key_file)
    sources.read()  # raises for what is wrong with them, before anything is loaded
    return sources


def _print_address(address: str, model: str, *, with_keys: bool) -> None:
    """Print where the server listens and a request to try."""
    auth = " -H 'Authorization: Bearer YOUR_KEY'" if with_keys else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is a chairlift?"}}]}}'
    note(f"Serving {model} at {address}. Try:\n")
    if address.startswith("unix:"):
        address = f"--unix-socket {address.removeprefix('unix:')} http://localhost"
    typer.echo(f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{auth} \\\n  -d '{body}'\n")
    sys.stdout.flush()
