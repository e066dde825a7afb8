"""Limits on requests and tokens per minute and on concurrent requests, for the keys of one name together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from chairlift.server.access.keys import APIKey, KeyLimits
from chairlift.server.metrics import Metrics
from chairlift.server.wire.errors import APIError

REQUESTS, TOKENS, CONCURRENT = "requests", "tokens", "concurrent"

Headers = dict[str, str]


@dataclass(slots=True)
class Grant:
    """A request that was granted, until its end."""

    key: APIKey
    headers: Headers  # Those of its response.
    number: int = 0  # distinguishes the grants of one process from each other where another one decides


class RateLimits(Protocol):
    """Grants requests. In a front end with several processes, one of them decides for all."""

    async def begin(self, key: APIKey) -> Grant:
        """Count a request that begins. Raises a 429 error if it exceeds a limit."""

    async def charge(self, grant: Grant, tokens: int) -> None:
        """Count the tokens that a request may use. Raises a 429 error if they exceed the limit."""

    def end(self, grant: Grant, unused: int) -> None:
        """End a request and give back the charged tokens that it did not use; negative if it used more."""


class Allowance:
    """What one request is charged for."""

    def __init__(self, limits: RateLimits, grant: Grant) -> None:
        self._limits = limits
        self._grant = grant
        self._charged = 0

    @property
    def headers(self) -> Headers:
        """Those of the response."""
        return self._grant.headers

    async def charge(self, tokens: int) -> None:
        """Charge the tokens that the request may use, before it is submitted."""
        await self._limits.charge(self._grant, tokens)
        self._charged += tokens

    def settle(self, used: int | None) -> None:
        """End the request; `used` are its tokens, or None if it used what it was charged for."""
        self._limits.end(self._grant, 0 if used is None else self._charged - used)


class _Bucket:
    """Holds up to `limit` units and is refilled at `limit` units per minute."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._updated = now

    def level(self, now: float) -> float:
        self._level = min(self.limit, self._level + (now - self._updated) * self.limit / 60)
        self._updated = now
        return self._level

    def take(self, amount: int, now: float) -> None:
        """Take units. The level may become negative; it never exceeds the limit."""
        self._level = min(self.limit, self.level(now) - amount)

    def seconds_until(self, level: float, now: float) -> float:
        return max(0.0, (level - self.level(now)) * 60 / self.limit)


@dataclass(slots=True)
class _Account:
    limits: KeyLimits
    requests: _Bucket | None
    tokens: _Bucket | None
    open: int = 0


class RateLimiter:
    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def begin(self, key: APIKey) -> Grant:
        now, account = self._clock(), self._account(key)
        most = key.limits.concurrent_requests
        if most is not None and account.open >= most:
            raise self._refusal(key, CONCURRENT, f"{most} concurrent requests", 1.0)
        if account.requests is not None:
            if account.requests.level(now) < 1:
                wait = account.requests.seconds_until(1, now)
                raise self._refusal(key, REQUESTS, f"{account.requests.limit} requests per minute", wait)
            account.requests.take(1, now)
        account.open += 1
        return Grant(key, self._headers(account))

    async def charge(self, grant: Grant, tokens: int) -> None:
        key = grant.key
        now, account = self._clock(), self._account(key)
        bucket = account.tokens
        if bucket is not None:
            if tokens > bucket.limit:
                problem = f"{bucket.limit} tokens per minute, and this request alone may need {tokens}"
                raise self._refusal(key, TOKENS, problem, None)
            if bucket.level(now) < tokens:
                wait = bucket.seconds_until(tokens, now)
                raise self._refusal(key, TOKENS, f"{bucket.limit} tokens per minute", wait)
            bucket.take(tokens, now)
        grant.headers = self._headers(account)

    def end(self, grant: Grant, unused: int) -> None:
        account = self._accounts[grant.key.name]  # its limits may have changed since
        account.open -= 1
        if account.tokens is not None:
            account.tokens.take(-unused, self._clock())

    def _account(self, key: APIKey) -> _Account:
        """Return the account of the key's name. New limits take effect at once, with full buckets."""
        known = self._accounts.get(key.name)
        if known is None or known.limits != key.limits:
            now, limits = self._clock(), key.limits
            requests = None if limits.requests_per_minute is None else _Bucket(limits.requests_per_minute, now)
            tokens = None if limits.tokens_per_minute is None else _Bucket(limits.tokens_per_minute, now)
            known = _Account(limits, requests, tokens, known.open if known else 0)
            self._accounts[key.name] = known
        return known

    def _refusal(self, key: APIKey, kind: str, limit: str, wait: float | None) -> APIError:
        """Return the error; without `wait`, trying again does not help."""
        self._metrics.refused.labels("429").inc()
        self._metrics.rate_limited.labels(key.name, kind).inc()
        headers = self._headers(self._accounts[key.name])
        if wait is not None:
            headers["Retry-After"] = str(max(1, math.ceil(wait)))
        message = f"the limit of this API key is reached: {limit}"
        return APIError(429, message, type_="rate_limit_error", code="rate_limit_exceeded", headers=headers)

    def _headers(self, account: _Account) -> Headers:
        """Return OpenAI's headers about the limits of this key."""
        headers: Headers = {}
        for kind, bucket in ((REQUESTS, account.requests), (TOKENS, account.tokens)):
            if bucket is not None:
                now = self._clock()
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level(now))))
                headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.seconds_until(bucket.limit, now))
        return headers


def _duration(seconds: float) -> str:
    """Write a duration as OpenAI does: 17ms, 1s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
