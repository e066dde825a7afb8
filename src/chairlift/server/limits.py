"""Limits on what clients may request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on requests, bodies, headers and connections."""

    max_waiting: int = 256  # sequences beyond max_batch_requests; more are answered with 429
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # of their shares; 1 for others
    max_text_jobs: int = 64  # concurrent tokenize and detokenize requests; more are answered with 429
    max_completions: int = 256  # per request: prompts x n
    max_body_bytes: int = 8 * 2**20
    max_file_bytes: int = 512 * 2**20  # of an uploaded file
    file_seconds: float = 600.0  # time limit for an upload
    max_body_values: int = 2**18  # JSON values in a body; parsing them blocks the event loop
    max_held_bytes: int = 512 * 2**20  # bodies of all requests in flight; more are answered with 429
    max_connections: int | None = None  # of a process; None: as many as its limit on open files allows
    max_headers: int = 128
    max_header_bytes: int = 32 * 2**10  # including the path and the query
    header_seconds: float = 10.0  # time limit for the headers of a request
    body_seconds: float = 60.0  # time limit for the body of a request
    linger_seconds: float = 30.0  # how long a refused client may go on sending before it is disconnected
    stall_seconds: float = 120.0  # a client that reads nothing for this long is disconnected
    keep_alive_seconds: float = 60.0  # how long a connection may stay open between requests
    default_timeout: float | None = None  # seconds, for requests without a timeout
    ping_seconds: float = 10.0  # a stream without output sends a comment after one to two such intervals
