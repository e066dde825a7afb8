"""What the ingress reads of a request's body, and what it writes into a stream whose replica died.

The router needs the length of a prompt, its output limit and the keys of its prefixes. Prompts are not tokenized here.
Their text is cut into pieces of four bytes, about the length of a token, so that `prefix_keys` and the loads of
replicas count in the same unit as tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from chairlift.cluster.routing.router import PrefixKey, RoutedRequest, prefix_keys
from chairlift.server.anthropic.errors import anthropic_error, is_messages_path
from chairlift.server.llamacpp.errors import LLAMACPP_PATHS, llamacpp_error
from chairlift.server.ollama.errors import OLLAMA_PREFIX, ollama_error
from chairlift.server.wire.errors import unavailable

TOKEN_BYTES = 4
MAX_INTEGER = 2**31

_json = msgspec.json.Encoder(order="deterministic")


# Fields that differ between equal requests of different clients; the engine does not see them.
_OF_THE_CLIENT = frozenset(
    ("user", "stream", "stream_options", "cache_salt", "priority", "targets", "service_tier", "timeout", "metadata")
)


# Servers accept other paths with these ends, too.
_GENERATION = re.compile(r"/(completions?|responses(/compact)?|messages|infill|api/chat|api/generate)$")


def generates(path: str) -> bool:
    """Whether a POST request to this path asks for output."""
    return _GENERATION.search(path) is not None


def body_identity(path: str, body: bytes) -> bytes:
    """Return what equal requests have in common, whichever client sends them."""
    with suppress(msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        fields = msgspec.json.decode(body)
        if isinstance(fields, dict):
            body = _json.encode({name: value for name, value in fields.items() if name not in _OF_THE_CLIENT})
    return hashlib.blake2b(path.encode("utf-8", "surrogatepass") + b"\0" + body, digest_size=16).digest()


def read_body(path: str, body: bytes, *, with_keys: bool, salt: str = "") -> RoutedRequest:
    """`salt` separates clients whose requests share no KV blocks. A body that cannot be read has an empty prompt: the
    replica will answer what is wrong with it."""
    try:
        fields = msgspec.json.decode(body)
        return _read_fields(path, fields if isinstance(fields, dict) else {}, with_keys=with_keys, salt=salt)
    except (
        msgspec.MsgspecError,
        ValueError,
        OverflowError,
        RecursionError,
    ):  # Values that cannot be written again are possible, too.
        return RoutedRequest(0)


def _read_fields(path: str, fields: dict[str, Any], *, with_keys: bool, salt: str) -> RoutedRequest:
    prompts = _prompts(path, fields)
    count = next((one for name in ("n_cmpl", "n") if (one := _integer(fields.get(name)))), 1)
    keys: tuple[PrefixKey, ...] = ()
    if with_keys and prompts:
        salt += "" if fields.get("cache_salt") is None else f" {fields['cache_salt']}"
        keys = prefix_keys(prompts[0], adapter=str(fields.get("model") or ""), salt=salt)
    limit = _output_limit(fields)
    most = None if limit is None else limit * count * max(1, len(prompts))
    return RoutedRequest(sum(map(len, prompts)), most, keys)


def _prompts(path: str, fields: dict[str, Any]) -> list[Sequence[int]]:
    """The prompts of a request in the order in which their parts are written before the model."""
    if path.endswith(("/chat/completions", "/api/chat")):
        return [_pieces(_parts(fields, "tools", "messages"))]
    if path.endswith(("/messages", "/count_tokens")):
        return [_pieces(_parts(fields, "tools", "system", "messages"))]
    if path.endswith(("/responses", "/responses/compact")):
        return [_pieces(_parts(fields, "tools", "instructions", "input"))]
    if path.endswith(("/completions", "/completion")):
        return _completion_prompts(fields.get("prompt"))
    if path.endswith("/api/generate"):
        return [_pieces(_parts(fields, "context", "system", "prompt", "suffix"))]
    if path.endswith("/infill"):
        return [_pieces(_parts(fields, "input_extra", "input_prefix", "prompt", "input_suffix"))]
    given = [
        fields[name]
        for name in ("query", "input", "content", "documents", "prompt", "text_1", "text_2")
        if name in fields
    ]
    return [_pieces([_json.encode(given)])] if given else []


def _completion_prompts(prompt: Any) -> list[Sequence[int]]:
    """The prompts of the field `prompt`: a text, tokens, or a list of either."""
    several = prompt if isinstance(prompt, list) and not _are_tokens(prompt) else [prompt]
    return [found for one in several if (found := _one_prompt(one)) is not None]


def _one_prompt(prompt: Any) -> Sequence[int] | None:
    if isinstance(prompt, str):
        return _pieces([prompt.encode("utf-8", "surrogatepass")])
    return prompt if isinstance(prompt, list) and _are_tokens(prompt) else None


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


def _integer(value: Any) -> int | None:
    """A number of tokens or completions; larger ones are refused by the replica."""
    return min(value, MAX_INTEGER) if type(value) is int and value >= 0 else None


def _output_limit(fields: dict[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict", "num_predict")
    if isinstance(options := fields.get("options"), dict):  # Ollama has it there.
        fields = options
    return next((limit for name in names if (limit := _integer(fields.get(name))) is not None), None)


EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"

_SEQUENCE_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


def is_whole(path: str, before: bytes) -> bool:
    """Whether a stream that ends with these events has its last one."""
    if path.startswith(OLLAMA_PREFIX) or path in LLAMACPP_PATHS:
        # Only the ends of long events are known: those before the last one end with this field.
        goes_on = b'"done":false}' if path.startswith(OLLAMA_PREFIX) else b'"stop":false}'
        return before != b"" and not before.rstrip(b"\n").endswith(goes_on)
    return before.endswith(DONE)


def error_events(path: str, before: bytes, request_id: str) -> bytes:
    """`before` are the last events of the stream."""
    error = unavailable("the replica that answered this request died; try again")
    if is_messages_path(path):
        return _event("error", anthropic_error(error.status_code, error.body, request_id))
    if path.startswith(OLLAMA_PREFIX):
        return msgspec.json.encode(ollama_error(error.status_code, error.body, request_id)) + b"\n"
    if path in LLAMACPP_PATHS:
        return b"data: " + msgspec.json.encode(llamacpp_error(error.status_code, error.body, request_id)) + EVENT_END
    body = error.body["error"]
    if path.endswith("/responses"):
        numbers = _SEQUENCE_NUMBER.findall(before)
        number = int(numbers[-1]) + 1 if numbers else 0
        fields = {"type": "error", "code": body["type"], "message": body["message"], "param": None}
        return _event("error", fields | {"sequence_number": number})
    return b"data: " + msgspec.json.encode(error.body) + EVENT_END + DONE


def _event(name: str, fields: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(fields) + EVENT_END
