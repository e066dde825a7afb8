"""The server's own options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from chairlift.errors import InvalidParameter
from chairlift.options import above, at_least, between, check_options, option, parse_bytes
from chairlift.text.tool_formats.base import TOOL_FORMATS

server_option, access_option = partial(option, group="Server"), partial(option, group="Access")
logging_option, supervision_option = partial(option, group="Logging"), partial(option, group="Supervision")


def _check_hosts(parameter: str, hosts: Sequence[str]) -> None:
    """Raise for an entry that names no host."""
    for host in hosts:
        name, colon, port = host.partition(":")
        if not name.strip("*.") or name.startswith("-") or "/" in host or (colon and not port.isdecimal()):
            raise InvalidParameter(parameter, f"must be hosts such as example.com or *.example.com, got {host[:100]!r}")


STANDARD_OUTPUT = Path("-")  # Names it as the file of the access log.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = server_option("127.0.0.1", common=True, help="Address to listen on; 0.0.0.0 accepts other machines.")
    port: int = server_option(8000, common=True, help="Port to listen on; 0 uses a free one.", check=between(0, 65535))
    uds: Path | None = server_option(None, help="Listen on this Unix socket instead of a port.", metavar="FILE")
    served_model_name: Sequence[str] | None = server_option(
        None,
        common=True,
        help="Name of the model in the API; may be repeated: all names are accepted, responses have the first.",
        metavar="NAME",
        default_text="as --model",
    )
    api_workers: int = server_option(
        1,
        help="HTTP processes. More of them help where one limits the throughput of many streams.",
        check=between(1, 64),
        aliases=("api_server_count",),
    )
    max_waiting: int = server_option(
        256, help="Completions that may wait in the queue; more are refused with 429.", check=at_least(0)
    )
    max_connections: int | None = server_option(
        None,
        help="Open connections. When there are as many, a new one takes the place of the one that is idle for longest.",
        check=at_least(8),
        default_text="as many as the limit on open files allows",
    )
    request_timeout: float | None = server_option(
        None, help="Seconds after which a request is cancelled.", check=at_least(0.001), default_text="never"
    )
    classes: Sequence[str] | None = server_option(
        None,
        help="Targets in milliseconds (ttft, tpot, e2e) of requests that name this class in service_tier or in the "
        "header x-chairlift-class, or whose API key has it; may be repeated. Needs --order slack or edf, or --budget "
        "slack.",
        metavar="NAME=TARGETS",
        flag="--class",
        default_text="no classes",
    )
    tool_format: str | None = server_option(
        None,
        help="Format of the model's tool calls.",
        choices=TOOL_FORMATS.names,
        default_text="from its chat template",
    )
    allow_image_urls: Sequence[str] | None = server_option(
        None,
        help="Hosts that images may be fetched from by URL, such as example.com or *.example.com; may be repeated. "
        "Private addresses are never connected to. Images in requests themselves are always read.",
        metavar="HOST",
        check=_check_hosts,
        default_text="none",
    )
    unknown_fields: str = server_option(
        "ignore",
        help="What happens to fields of a request that are not known: ignore names them in the response's header "
        "x-chairlift-ignored-fields. Misspelled parameters are always refused.",
        choices=("ignore", "refuse"),
    )
    dashboard: bool = server_option(True, help="Serve the live page at /dashboard.")
    policy_switch: bool | None = server_option(
        None,
        help="Let the dashboard change the batching policy of the running engine.",
        default_text="if only this machine can reach the server",
    )
    lora_folder: Path | None = server_option(
        None,
        help="Administrators may load adapters from below this folder (/v1/load_lora_adapter); one API worker only.",
        metavar="FOLDER",
        default_text="none",
    )
    files_dir: Path | None = server_option(
        None,
        help="Keep the files and batches of /v1/files and /v1/batches in this folder. It holds prompts and outputs.",
        metavar="FOLDER",
        default_text="no files",
    )
    files_quota: int | str = server_option(
        "10GiB", help="Size of all files of one API key.", metavar="SIZE", check=parse_bytes
    )
    responses_dir: Path | None = server_option(
        None,
        help="Keep responses and conversations in this folder, for previous_response_id, conversation and background. "
        "It holds prompts and outputs.",
        metavar="FOLDER",
        default_text="nothing is kept",
    )
    responses_expiry: float = server_option(
        30.0, help="Days after its last use that a response or a conversation is kept.", check=above(0)
    )
    responses_quota: int | str = server_option(
        "1GiB",
        help="Size of all responses and conversations of one API key; what was used longest ago makes room.",
        metavar="SIZE",
        check=parse_bytes,
    )
    api_key: Sequence[str] | None = access_option(
        None,
        common=True,
        help="Require this key, or 'NAME KEY'; may be repeated. Also read from CHAIRLIFT_API_KEY.",
        metavar="KEY",
        in_environment=False,  # CHAIRLIFT_API_KEY adds a key to the others, and must not be empty
    )
    api_key_file: Path | None = access_option(
        None,
        help="Require one of the keys in this file: one per line, or YAML or TOML with names and limits. SIGHUP reads "
        "it again.",
        metavar="FILE",
    )
    isolate_keys: bool = access_option(
        False,
        help="Never share cached prefixes between API keys, and show metrics and the dashboard to administrators only.",
        negatable=False,
    )
    public_metrics: bool = access_option(
        False, help="Serve /metrics without a key and to any host name.", negatable=False
    )
    cors_origin: Sequence[str] | None = access_option(
        None, help="Let web pages of this origin call the server; may be repeated, '*' is all.", metavar="ORIGIN"
    )
    allowed_host: Sequence[str] | None = access_option(
        None,
        help="Without API keys, also answer requests to this host name; may be repeated, '*' is all. Addresses and "
        "this machine's own names always work.",
        metavar="NAME",
    )
    ssl_certfile: Path | None = access_option(
        None, help="Serve HTTPS with this certificate chain (PEM).", metavar="FILE"
    )
    ssl_keyfile: Path | None = access_option(
        None, help="Private key of the certificate (PEM).", metavar="FILE", default_text="in the certificate's file"
    )
    access_log: Path | None = logging_option(
        None,
        common=True,
        help="Write one JSON line per request to this file; '-' is standard output. It has no prompts and no outputs.",
        metavar="FILE",
    )
    access_log_salt: str | None = logging_option(
        None,
        help="Secret with which the access log hashes the blocks of prompts. Logs of servers with the same one can be "
        "simulated together.",
        metavar="KEY",
        default_text="drawn at each start",
    )
    request_log: bool | None = logging_option(
        None,
        common=True,
        help="Print a line per request on standard error: tokens, time to the first token, tokens/s and status.",
        default_text="if that is a terminal",
    )
    otlp_traces_endpoint: str | None = logging_option(
        None,
        help="Send OpenTelemetry traces to this OTLP address over HTTP, such as http://localhost:4318. Needs "
        "chairlift[otel].",
        metavar="URL",
    )
    log_level: str | None = logging_option(
        None,
        help="Least severe messages on standard error.",
        choices=("debug", "info", "warning", "error"),
        default_text="info, warning for the engine; with --verbose info, with --quiet error for both",
    )
    drain_timeout: float = supervision_option(
        30.0, help="Seconds for running requests to finish at shutdown.", check=at_least(0)
    )
    step_timeout: float = supervision_option(
        300.0, help="Seconds in one step after which the engine counts as hung and is restarted.", check=at_least(0.1)
    )
    heartbeat_timeout: float = supervision_option(
        10.0,
        help="Seconds without a heartbeat after which the engine counts as dead and is restarted.",
        check=at_least(1),
    )

    def __post_init__(self) -> None:
        check_options(self)
