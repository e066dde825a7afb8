"""Limits on what clients may request, and shares of tenants in them, so that no tenant takes all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on requests, bodies, headers and connections."""

    max_waiting: int = 256  # sequences beyond max_batch_requests; more are answered with 429
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # The weights of their shares; 1 for others.
    max_text_jobs: int = 64  # concurrent tokenize and detokenize requests; more are answered with 429
    max_completions: int = 256  # A request's: prompts x n.
    max_body_bytes: int = 8 * 2**20
    max_file_bytes: int = 512 * 2**20  # An uploaded file's.
    file_seconds: float = 600.0  # time limit for an upload
    max_body_values: int = 2**18  # JSON values in a body; parsing them blocks the event loop
    max_held_bytes: int = 512 * 2**20  # bodies of all requests in flight; more are answered with 429
    max_connections: int | None = None  # A process's; None: as many as its limit on open files allows.
    max_headers: int = 128
    max_header_bytes: int = 32 * 2**10  # They include the path and the query.
    header_seconds: float = 10.0  # time limit for the headers of a request
    body_seconds: float = 60.0  # time limit for the body of a request
    linger_seconds: float = 30.0  # how long a refused client may go on sending before it is disconnected
    stall_seconds: float = 120.0  # a client that reads less than half of what waits for it is disconnected
    keep_alive_seconds: float = 60.0  # how long a connection may stay open between requests
    default_timeout: float | None = None  # seconds, for requests without a timeout
    ping_seconds: float = 10.0  # a stream with nothing to send sends a comment after one to two such intervals


MOST_OVER_LIMIT = 2  # times a limit that tenants may use together by claiming their shares


def shares_of(limit: float, tenants: Collection[str], weights: Mapping[str, float]) -> dict[str, float]:
    """Divide `limit` among the tenants by weight."""
    total = sum(weights.get(one, 1.0) for one in tenants)
    return {one: limit * weights.get(one, 1.0) / total for one in tenants}


class SharedLimit:
    """A limit on what all tenants use together. Beyond it, a tenant may still use its share, up to twice the limit."""

    def __init__(self, limit: int, weights: Mapping[str, float] | None = None) -> None:
        self._limit = limit
        self._weights = weights or {}
        self._using: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._using.total()

    def has_room(self, tenant: str, amount: int) -> bool:
        if self.total + amount <= self._limit:
            return True
        if self.total + amount > MOST_OVER_LIMIT * self._limit:
            return False
        shares = shares_of(self._limit, self._using.keys() | {tenant}, self._weights)
        return self._using[tenant] + amount <= shares[tenant]

    def take(self, tenant: str, amount: int) -> bool:
        """Count what a tenant uses; return whether there was room for it."""
        had_room = self.has_room(tenant, amount)
        self._using[tenant] += amount
        return had_room

    def give_back(self, tenant: str, amount: int) -> None:
        self._using[tenant] -= amount
        if not self._using[tenant]:
            del self._using[tenant]
