"""The configuration of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift.server.access.keys import KeySources
from chairlift.server.http.listener import Certificate
from chairlift.server.http.unknown_fields import UnknownFieldsRule
from chairlift.server.limits import Limits
from chairlift.server.process.early_start import ENGINE_MODULE
from chairlift.server.process.engine_client import Supervision


@dataclass(frozen=True, slots=True)
class ServerConfig:
    model: str
    served_names: Sequence[str] = ()  # empty: as `model`
    engine: dict[str, Any] = field(default_factory=dict)  # options of EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None  # Unix socket to listen on instead
    certificate: Certificate | None = None  # None: HTTP without TLS
    access_log: Path | None = None  # "-" for standard output
    traces_endpoint: str | None = None  # for OpenTelemetry; None: no traces
    log_level: str = "info"
    chat_template: Path | None = None  # replaces the model's
    keys: KeySources = field(default_factory=KeySources)
    isolate_keys: bool = False  # whether requests with different keys share nothing, and only administrators see all
    cors_origins: Sequence[str] = ()  # origins of web pages that may call the server
    allowed_hosts: Sequence[str] = ()  # further host names that a server without keys answers to
    files_dir: Path | None = None  # of uploaded files and batches; None: there are none
    files_quota: int = 10 * 2**30  # bytes of the files of one key
    drain_timeout: float = 30.0
    api_workers: int = 1  # HTTP processes; with more than one, a further process joins them with the engine
    engine_module: str = ENGINE_MODULE  # run as the engine process; tests and benchmarks run others
    limits: Limits = field(default_factory=Limits)
    supervision: Supervision = field(default_factory=Supervision)
    unknown_fields: UnknownFieldsRule = "ignore"  # what happens to fields of requests that are not known
    tool_format: str | None = None  # tool-call format; None: detected from the chat template
    dashboard: bool = True  # whether to serve /dashboard
    public_metrics: bool = False  # whether /metrics needs no key
    policy_switch: bool | None = None  # whether clients may change the policy; None: only if the server is local
    quiet: bool = False

    @property
    def model_name(self) -> str:
        """The name of the model in responses."""
        return self.served_names[0] if self.served_names else self.model

    def may_switch_policy(self) -> bool:
        if self.policy_switch is not None:
            return self.policy_switch
        return not self.keys and (self.host == "localhost" or self.host == "::1" or self.host.startswith("127."))
