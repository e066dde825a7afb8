"""API keys and what each of them may use.

Each key names a tenant and may have limits on requests and tokens per minute and on concurrent requests, for all
keys of its name together. The keys come from options and from a file that can be reloaded.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from chairlift.errors import InvalidParameter
from chairlift.options import MAPPING_SUFFIXES, read_mapping, read_text
from chairlift.server.metrics import Metrics
from chairlift.server.wire.errors import APIError

FILE_PARAMETER = "api_key_file"
SAFE_LENGTH = 16  # characters of a key; shorter ones are accepted with a warning

log = logging.getLogger("chairlift.server")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What the keys of one name may use together; None means without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompts and outputs
    concurrent_requests: int | None = None

    def __bool__(self) -> bool:
        return self != KeyLimits()


@dataclass(frozen=True, slots=True)
class APIKey:
    name: str  # The tenant's; several keys may have the same.
    digest: bytes  # SHA-256
    limits: KeyLimits = KeyLimits()
    service_class: str = ""  # The class of its requests, unless they choose one.
    is_proxy: bool = False  # whether its owner authenticates clients itself and sends the names of their keys
    is_admin: bool = False  # whether its owner sees all tenants where keys are isolated
    is_short: bool = False  # whether it can be guessed


class KeyTable:
    """The API keys of a server. `replace` changes them while it runs."""

    def __init__(self, keys: Iterable[APIKey] = ()) -> None:
        self.replace(keys)

    def __iter__(self) -> Iterator[APIKey]:
        return iter(self._keys.values())

    def replace(self, keys: Iterable[APIKey]) -> None:
        self._keys = {key.digest: key for key in keys}
        self.is_empty = not self._keys  # the server is open to all

    def get(self, digest: bytes) -> APIKey | None:
        """Return the key with this digest; None if there is none, or none any more."""
        return self._keys.get(digest)

    def find(self, secret: bytes) -> APIKey | None:
        """Return the key that a client sent. The time of a lookup depends on the digest, which reveals nothing."""
        return self._keys.get(_digest(secret))


@dataclass(frozen=True, slots=True)
class KeySources:
    """Where the keys come from: texts such as "KEY" or "NAME KEY", and a file."""

    texts: Sequence[str] = ()
    file: Path | None = None
    proxy: str = ""  # key of a proxy in front of the server, see `APIKey.is_proxy`

    def __bool__(self) -> bool:
        return bool(self.texts or self.proxy) or self.file is not None

    def read(self) -> list[APIKey]:
        keys = list(_from_texts(self.texts, "api_key"))
        if self.file is not None:
            found = _from_file(self.file, first_number=len(keys) + 1)
            if not found:  # the server must not be open to all because a file is empty
                raise InvalidParameter(FILE_PARAMETER, f"{str(self.file)!r} has no keys")
            keys += found
        if self.proxy:
            keys.append(APIKey("", _digest(_checked(self.proxy, "proxy_key")), is_proxy=True))
        limits: dict[str, KeyLimits] = {}
        digests: set[bytes] = set()
        for key in keys:
            if key.digest in digests:
                raise InvalidParameter("api_key", f"the key of {key.name!r} is given twice")
            if limits.setdefault(key.name, key.limits) != key.limits:
                raise InvalidParameter(FILE_PARAMETER, f"{key.name!r} has keys with different limits")
            digests.add(key.digest)
        return keys


def _from_texts(texts: Iterable[str], parameter: str, first_number: int = 1) -> Iterator[APIKey]:
    """Yield the keys: "alice KEY" has the name alice; keys without a name are numbered."""
    for number, text in enumerate(texts, start=first_number):
        name, _, secret = text.strip().rpartition(" ")
        yield _make_key(name.strip() or f"key-{number}", secret, parameter)


def _from_file(file: Path, first_number: int) -> list[APIKey]:
    if file.suffix.lower() in MAPPING_SUFFIXES:
        entries = read_mapping(file, FILE_PARAMETER)
        return [key for name, entry in entries.items() for key in _from_entry(file, str(name), entry)]
    lines = read_text(file, FILE_PARAMETER).splitlines()
    return list(_from_texts(filter(str.strip, lines), FILE_PARAMETER, first_number))


def _from_entry(file: Path, name: str, entry: Any) -> list[APIKey]:
    """Return the keys of one name: {key: KEY} or {keys: [KEY, …]}, with `admin`, `class` and the fields of
    `KeyLimits`."""

    def refuse(problem: str) -> InvalidParameter:
        return InvalidParameter(FILE_PARAMETER, f"{file}: {name}: {problem}")

    if not name.strip():  # a proxy could not tell such a client's key from its own
        raise refuse("each key must have a name")
    if not isinstance(entry, Mapping):
        raise refuse("must have the field 'key' or 'keys'")
    known = [item.name for item in fields(KeyLimits)]
    for field, value in entry.items():
        if field not in (*known, "key", "keys", "admin", "class"):
            raise refuse(f"unknown field {field!r}; choose from key, keys, admin, class, {', '.join(known)}")
        if field == "class" and (not isinstance(value, str) or not value):
            raise refuse(f"class must be the name of a class, got {value!r}")
        if field == "admin" and not isinstance(value, bool):
            raise refuse(f"admin must be true or false, got {value!r}")
        if field in known and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise refuse(f"{field} must be an integer of at least 1, got {value!r}")
    secrets = entry.get("keys", [entry.get("key")])
    if ("key" in entry) == ("keys" in entry) or not isinstance(secrets, list) or not secrets:
        raise refuse("must have either 'key', a text, or 'keys', a list of texts")
    if not all(isinstance(secret, str) for secret in secrets):
        raise refuse("keys must be texts; put them in quotes")
    limits = KeyLimits(**{field: entry[field] for field in known if field in entry})
    keys = [_make_key(name, secret, FILE_PARAMETER) for secret in secrets]
    service_class, is_admin = entry.get("class", ""), entry.get("admin", False)
    return [replace(key, limits=limits, service_class=service_class, is_admin=is_admin) for key in keys]


def _make_key(name: str, secret: str, parameter: str) -> APIKey:
    return APIKey(name, _digest(_checked(secret, parameter)), is_short=len(secret) < SAFE_LENGTH)


def warn_of_short_keys(keys: Iterable[APIKey]) -> None:
    for key in keys:
        if key.is_short:
            problem = f"has fewer than {SAFE_LENGTH} characters and may be guessed"
            log.warning("the API key of %r %s; 'openssl rand -hex 24' makes a better one", key.name, problem)


def _checked(secret: str, parameter: str) -> str:
    if not secret.isascii() or not secret.strip() or " " in secret:
        raise InvalidParameter(parameter, "must be non-empty ASCII")
    return secret


def _digest(secret: str | bytes) -> bytes:
    return hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()


# ---- what the keys of one name use -----------------------------------------------------------------------------------

REQUESTS, TOKENS, CONCURRENT = "requests", "tokens", "concurrent"

Headers = dict[str, str]


@dataclass(slots=True)
class Allowance:
    """What a request that was granted is charged for, until its end."""

    limits: RateLimits
    key: APIKey
    headers: Headers  # Those of its response.
    number: int = 0  # distinguishes those of one process from each other where another one decides
    _charged: int = 0

    async def charge(self, tokens: int) -> None:
        """Charge the tokens that the request may use, before it is submitted."""
        await self.limits.charge(self, tokens)
        self._charged += tokens

    def settle(self, used: int | None) -> None:
        """End the request; `used` are its tokens, or None if it used what it was charged for."""
        self.limits.end(self, 0 if used is None else self._charged - used)


class RateLimits(Protocol):
    """Grants requests. In a front end with several processes, one of them decides for all."""

    async def begin(self, key: APIKey) -> Allowance:
        """Count a request that begins. Raises a 429 error if it exceeds a limit."""

    async def charge(self, allowance: Allowance, tokens: int) -> None:
        """Count the tokens that a request may use. Raises a 429 error if they exceed the limit."""

    def end(self, allowance: Allowance, unused: int) -> None:
        """End a request and give back the charged tokens that it did not use; negative if it used more."""


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
    buckets: dict[str, _Bucket]  # The key is what they hold; there is one for each limit per minute.
    open: int


class RateLimiter:
    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def begin(self, key: APIKey) -> Allowance:
        account, most = self._account(key), key.limits.concurrent_requests
        if most is not None and account.open >= most:
            raise self._refusal(key, CONCURRENT, f"{most} concurrent requests", 1.0)
        self._take(key, account, REQUESTS, 1)
        account.open += 1
        return Allowance(self, key, self._headers(account))

    async def charge(self, allowance: Allowance, tokens: int) -> None:
        account = self._account(allowance.key)
        self._take(allowance.key, account, TOKENS, tokens)
        allowance.headers = self._headers(account)

    def _take(self, key: APIKey, account: _Account, kind: str, amount: int) -> None:
        """Take requests or tokens, if they are limited. Raises a 429 error if there are not as many."""
        now, bucket = self._clock(), account.buckets.get(kind)
        if bucket is None:
            return
        if amount > bucket.limit:
            problem = f"{bucket.limit} {kind} per minute, and this request alone may need {amount}"
            raise self._refusal(key, kind, problem, None)
        if bucket.level(now) < amount:
            wait = bucket.seconds_until(amount, now)
            raise self._refusal(key, kind, f"{bucket.limit} {kind} per minute", wait)
        bucket.take(amount, now)

    def end(self, allowance: Allowance, unused: int) -> None:
        account = self._accounts[allowance.key.name]  # its limits may have changed since
        account.open -= 1
        if TOKENS in account.buckets:
            account.buckets[TOKENS].take(-unused, self._clock())

    def _account(self, key: APIKey) -> _Account:
        """Return the account of the key's name. New limits take effect at once, with full buckets."""
        known = self._accounts.get(key.name)
        if known is None or known.limits != key.limits:
            most = {REQUESTS: key.limits.requests_per_minute, TOKENS: key.limits.tokens_per_minute}
            buckets = {kind: _Bucket(limit, self._clock()) for kind, limit in most.items() if limit is not None}
            known = self._accounts[key.name] = _Account(key.limits, buckets, known.open if known else 0)
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
        for kind, bucket in account.buckets.items():
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
