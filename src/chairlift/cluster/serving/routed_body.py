"""What the router reads of an HTTP request: the length of its prompt, its output limit and the keys of its prefixes.

Prompts are not tokenized here. Their text is cut into pieces of four bytes, about the length of a token, so that
`prefix_keys` and the loads of replicas count in the same unit as tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from chairlift.cluster.routing.prefix_keys import PrefixKey, prefix_keys
from chairlift.cluster.routing.request import RoutedRequest

TOKEN_BYTES = 4

_json = msgspec.json.Encoder(order="deterministic")


class RoutedBody(NamedTuple):
    request: RoutedRequest
    streams: bool  # whether the client wants the response as events


def read_body(path: str, body: bytes, *, with_keys: bool, salt: str = "") -> RoutedBody:
    """`salt` separates clients whose requests share no KV blocks."""
    fields = _fields(body)
    prompts = _prompts(path, fields)
    count = _count(fields)
    keys: tuple[PrefixKey, ...] = ()
    if with_keys and prompts:
        salt += "" if fields.get("cache_salt") is None else f" {fields['cache_salt']}"
        keys = prefix_keys(prompts[0], adapter=str(fields.get("model") or ""), salt=salt)
    limit = _output_limit(fields)
    most = None if limit is None else limit * count * max(1, len(prompts))
    return RoutedBody(RoutedRequest(sum(map(len, prompts)), most, keys), fields.get("stream") is True)


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a JSON body; none if it is malformed, which the replica will answer."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _prompts(path: str, fields: dict[str, Any]) -> list[Sequence[int]]:
    """The prompts of a request in the order in which their parts are written before the model."""
    if path.endswith("/chat/completions"):
        return [_pieces(_parts(fields, "tools", "messages"))]
    if path.endswith(("/messages", "/count_tokens")):
        return [_pieces(_parts(fields, "tools", "system", "messages"))]
    if path.endswith("/responses"):
        return [_pieces(_parts(fields, "tools", "instructions", "input"))]
    if path.endswith("/completions"):
        return _completion_prompts(fields.get("prompt"))
    given = [fields[name] for name in ("query", "input", "documents", "prompt", "text_1", "text_2") if name in fields]
    return [_pieces([_json.encode(given)])] if given else []


def _completion_prompts(prompt: Any) -> list[Sequence[int]]:
    if isinstance(prompt, str):
        return [_pieces([prompt.encode("utf-8", "surrogatepass")])]
    if not isinstance(prompt, list) or not prompt:
        return []
    if _are_tokens(prompt):
        return [prompt]
    return [found for one in prompt for found in _completion_prompts(one)]


def _are_tokens(prompt: list[Any]) -> bool:
    return all(type(one) is int and 0 <= one < 2**32 for one in prompt)


def _parts(fields: dict[str, Any], *names: str) -> Iterable[bytes]:
    """The JSON of each field, and of each item of a list on its own, so that lists with the same beginning share it."""
    for name in names:
        value = fields.get(name)
        for item in value if isinstance(value, list) else () if value is None else (value,):
            yield _json.encode(item)


def _pieces(parts: Iterable[bytes]) -> Sequence[int]:
    text = b"\n".join(parts)
    whole = len(text) - len(text) % TOKEN_BYTES
    return memoryview(text[:whole]).cast("I")


def _count(fields: dict[str, Any]) -> int:
    n = fields.get("n")
    return n if type(n) is int and n > 0 else 1


def _output_limit(fields: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if type(limit := fields.get(name)) is int and limit >= 0:
            return limit
    return None
