"""The server's own options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.options import at_least, between, check_options, option, parse_bytes
from chairlift.text.tool_formats.base import TOOL_FORMATS

SERVER, ACCESS, LOGGING, SUPERVISION = "Server", "Access", "Logging", "Supervision"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0 accepts other machines.", group=SERVER)
    port: int = option(8000, help="Port to listen on; 0 uses a free one.", group=SERVER, check=between(0, 65535))
    uds: Path | None = option(None, help="Listen on this Unix socket instead of a port.", group=SERVER, metavar="PATH")
    served_model_name: Sequence[str] | None = option(
        None,
        help="Name of the model in the API; may be repeated: all names are accepted, responses have the first.",
        group=SERVER,
        metavar="NAME",
        default_text="as --model",
    )
    chat_template: Path | None = option(
        None,
        help="Jinja file that replaces the model's chat template.",
        group=SERVER,
        metavar="FILE",
        default_text="the model's own",
    )
    api_workers: int = option(
        1,
        help="HTTP processes. More than one help when the front end limits the throughput of many streams.",
        group=SERVER,
        check=between(1, 64),
        aliases=("api_server_count",),
    )
    max_waiting: int = option(
        256, help="Completions that may wait in the queue; more are refused with 429.", group=SERVER, check=at_least(0)
    )
    max_connections: int | None = option(
        None,
        help="Open connections. When there are as many, a new one takes the place of the one that is idle for longest.",
        group=SERVER,
        check=at_least(8),
        default_text="as many as the limit on open files allows",
    )
    request_timeout: float | None = option(
        None,
        help="Seconds after which a request is cancelled.",
        group=SERVER,
        check=at_least(0.001),
        default_text="never",
    )
    tool_format: str | None = option(
        None,
        help="Format of the model's tool calls.",
        group=SERVER,
        choices=TOOL_FORMATS.names,
        default_text="from its chat template",
    )
    unknown_fields: str = option(
        "ignore",
        help="What happens to fields of a request that are not known: ignore names them in the response's header "
        "x-chairlift-ignored-fields. Misspelled parameters are always refused.",
        group=SERVER,
        choices=("ignore", "refuse"),
    )
    dashboard: bool = option(True, help="Serve the live page at /dashboard.", group=SERVER)
    policy_switch: bool | None = option(
        None,
        help="Let the dashboard change the batching policy of the running engine.",
        group=SERVER,
        default_text="if only this machine can reach the server",
    )
    files_dir: Path | None = option(
        None,
        help="Keep the files and batches of /v1/files and /v1/batches in this folder. It holds prompts and outputs.",
        group=SERVER,
        metavar="FOLDER",
        default_text="no files",
    )
    files_quota: int | str = option(
        "10GiB", help="Size of all files of one API key.", group=SERVER, metavar="SIZE", check=parse_bytes
    )
    api_key: Sequence[str] | None = option(
        None,
        help="Require this key, or 'NAME KEY'; may be repeated. Also read from CHAIRLIFT_API_KEY.",
        group=ACCESS,
        metavar="KEY",
        in_environment=False,  # CHAIRLIFT_API_KEY adds a key to the others, and must not be empty
    )
    api_key_file: Path | None = option(
        None,
        help="Require one of the keys in this file: one per line, or YAML or TOML with names and limits. SIGHUP reads "
        "it again.",
        group=ACCESS,
        metavar="FILE",
    )
    isolate_keys: bool = option(
        False,
        help="Never share cached prefixes between API keys, and show metrics and the dashboard to administrators only.",
        group=ACCESS,
        negatable=False,
    )
    public_metrics: bool = option(
        False, help="Serve /metrics without a key and to any host name.", group=ACCESS, negatable=False
    )
    cors_origin: Sequence[str] | None = option(
        None,
        help="Let web pages of this origin call the server; may be repeated, '*' is all.",
        group=ACCESS,
        metavar="ORIGIN",
    )
    allowed_host: Sequence[str] | None = option(
        None,
        help="Without API keys, also answer requests to this host name; may be repeated, '*' is all. Addresses and "
        "this machine's own names always work.",
        group=ACCESS,
        metavar="NAME",
    )
    ssl_certfile: Path | None = option(
        None, help="Serve HTTPS with this certificate chain (PEM).", group=ACCESS, metavar="FILE"
    )
    ssl_keyfile: Path | None = option(
        None,
        help="Private key of the certificate (PEM).",
        group=ACCESS,
        metavar="FILE",
        default_text="in the certificate's file",
    )
    access_log: Path | None = option(
        None,
        help="Write one JSON line per request to this file; '-' is standard output. It has no prompts and no outputs.",
        group=LOGGING,
        metavar="FILE",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        help="Send OpenTelemetry traces to this OTLP address over HTTP, such as http://localhost:4318. Needs "
        "chairlift[otel].",
        group=LOGGING,
        metavar="URL",
    )
    log_level: str | None = option(
        None,
        help="Least severe messages on standard error.",
        group=LOGGING,
        choices=("debug", "info", "warning", "error"),
        default_text="info; warning with --quiet",
    )
    drain_timeout: float = option(
        30.0, help="Seconds for running requests to finish at shutdown.", group=SUPERVISION, check=at_least(0)
    )
    step_timeout: float = option(
        300.0,
        help="Seconds in one step after which the engine counts as hung and is restarted.",
        group=SUPERVISION,
        check=at_least(0.1),
    )
    heartbeat_timeout: float = option(
        10.0,
        help="Seconds without a heartbeat after which the engine counts as dead and is restarted.",
        group=SUPERVISION,
        check=at_least(1),
    )

    def __post_init__(self) -> None:
        check_options(self)
