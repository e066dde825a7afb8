"""Invalid requests get clear errors, and the server stays healthy."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.server.expected_errors import expect, nested
from tests.server.running_server import HTTP, NAME, RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def called(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


BAD_SAMPLING: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": 1e9}, "temperature", "invalid_value"),
    ({"temperature": float("nan")}, "temperature", "invalid_value"),
    ({"temperature": float("inf")}, "temperature", "invalid_value"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 10_000}, "n", "invalid_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": "x"}, "seed", "invalid_type"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"repetition_penalty": 1e-39}, "repetition_penalty", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 1000}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"stop": [1]}, "stop[0]", "invalid_type"),
    ({"stop": ["a"] * 65}, "stop", "invalid_value"),
    ({"stop": "a" * 5000}, "stop", "invalid_value"),
    ({"stop": ["a" * 100] * 50}, "stop", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -5}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"min_tokens": -1}, "min_tokens", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_value"),
    ({"min_tokens": 100_000, "max_tokens": 200_000}, "max_tokens", "context_length_exceeded"),
    ({"timeout": 0}, "timeout", "invalid_value"),
    ({"timeout": -1}, "timeout", "invalid_value"),
    ({"ignore_eos": "yes"}, "ignore_eos", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_use": 1}}, "stream_options.include_use", "unknown_parameter"),
    ({"cache_salt": "x" * 300}, "cache_salt", "invalid_value"),
    ({"temprature": 0.5}, "temprature", "unknown_parameter"),
    ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    ({"min_tokens": 10**30}, "min_tokens", "invalid_value"),
    ({"top_k": 10**30}, "top_k", "invalid_value"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids[0]", "invalid_value"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    ({"stop": "\ud800"}, "stop", "invalid_value"),
    ({"stop": ["\ud800"]}, "stop", "invalid_value"),
    ({f"colour{i}": "red" for i in range(300)}, None, "invalid_value"),
    ({"model": 3}, "model", "invalid_type"),
]

BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": "hello"}, "messages", "invalid_type"),
    ({"messages": [3]}, "messages[0]", "invalid_type"),
    ({"messages": [{}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages", "context_length_exceeded"),
    ({"messages": [*HELLO, {"role": "wizard", "content": "x"}]}, "messages[1].role", "invalid_value"),
    ({"max_tokens": 240}, "max_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": 240}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"message": 1}}, "chat_template_kwargs.message", "unknown_parameter"),
    ({"chat_template_kwargs": {"max_tokens": 1}}, "chat_template_kwargs", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": "hello", "deep": nested(600)}]},
        f"messages[0].deep{'[0]' * 32}",
        "invalid_value",
    ),
    ({"messages": [{"role": "user", "content": "hello", "wide": [[]] * 100_000}]}, "messages[0]", "invalid_value"),
    ({"messages": [called("[" * 5000)]}, "messages[0].tool_calls[0].function.arguments", "invalid_value"),
    ({"messages": [called("3")]}, "messages[0].tool_calls[0].function.arguments", "invalid_value"),
]

BAD_PROMPTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, -1]}, "prompt", "invalid_value"),
    ({"prompt": [1, 10**6]}, "prompt", "invalid_value"),
    ({"prompt": [1, 10**30]}, "prompt[1]", "invalid_value"),
    ({"prompt": ["good", ""]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 300}, "prompt", "invalid_value"),
    ({"prompt": [5] * 256}, "prompt", "context_length_exceeded"),
    ({"suffix": "x"}, "suffix", "invalid_value"),
    ({"n": 3, "best_of": 2}, "best_of", "invalid_value"),
    ({"best_of": 3, "stream": True}, "stream", "invalid_value"),
    ({"beam_width": 2, "stream": True}, "stream", "invalid_value"),
    ({"beam_width": 1}, "beam_width", "invalid_value"),
    ({"beam_width": 65}, "beam_width", "invalid_value"),
    ({"use_beam_search": True}, "beam_width", "invalid_value"),
    ({"use_beam_search": False, "beam_width": 2}, "use_beam_search", "invalid_value"),
    ({"beam_width": 2, "best_of": 3}, "best_of", "invalid_value"),
    ({"beam_width": 2, "n": 3}, "n", "invalid_value"),
    ({"beam_width": 2, "temperature": 0.5}, "temperature", "invalid_value"),
    ({"beam_width": 2, "top_k": 5}, "top_k", "invalid_value"),
    ({"beam_width": 2, "presence_penalty": 0.5}, "presence_penalty", "invalid_value"),
    ({"beam_width": 2, "guided_regex": "a+"}, "guided_regex", "invalid_value"),
    ({"beam_width": 2, "stop": "a"}, "stop", "invalid_value"),
    ({"length_penalty": 2.0}, "length_penalty", "invalid_value"),
    ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty", "invalid_value"),
    ({"early_stopping": True}, "early_stopping", "invalid_value"),
    ({"echo": True, "suffix": "x"}, "echo", "invalid_value"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "stream", "invalid_value"),
    ({"prompt_logprobs": 1, "beam_width": 2}, "prompt_logprobs", "invalid_value"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 0, "echo": True, "beam_width": 2}, "max_tokens", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"prompt": ["a"] * 200, "n": 2}, "n", "invalid_value"),
    ({"prompt": "x" * 10**6}, "prompt", "context_length_exceeded"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("change", "param", "code"), BAD_SAMPLING, ids=lambda value: ascii(value)[:60])
def test_invalid_sampling_parameters_are_refused(
    server: RunningServer, path: str, change: dict[str, Any], param: str | None, code: str
) -> None:
    body = {"model": NAME, "max_tokens": 4} | ({"messages": HELLO} if path == CHAT else {"prompt": "hello"})
    expect(server, server.post(path, body | change), 400, param, code)


@pytest.mark.parametrize(("change", "param", "code"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_invalid_chat_parameters_are_refused(
    server: RunningServer, change: dict[str, Any], param: str, code: str
) -> None:
    expect(server, server.post(CHAT, {"model": NAME, "messages": HELLO, **change}), 400, param, code)


@pytest.mark.parametrize(("change", "param", "code"), BAD_PROMPTS, ids=lambda value: str(value)[:40])
def test_invalid_prompts_are_refused(server: RunningServer, change: dict[str, Any], param: str, code: str) -> None:
    expect(server, server.post(TEXT, {"model": NAME, "prompt": "hello", **change}), 400, param, code)


JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"model": NAME, "prompt": "hello"}).encode()
BIG = b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}'

# Errors that are found before the parameters are validated: method, path, headers, body, status, code.
BAD_MESSAGES: dict[str, tuple[str, str, dict[str, str], bytes, int, str | None]] = {
    "no body": ("POST", TEXT, JSON, b"", 400, "missing_required_parameter"),
    "half an object": ("POST", TEXT, JSON, b"{", 400, "invalid_json"),
    "a list": ("POST", TEXT, JSON, b"[]", 400, "invalid_type"),
    "null": ("POST", CHAT, JSON, b"null", 400, "invalid_type"),
    "a string": ("POST", CHAT, JSON, b'"text"', 400, "invalid_type"),
    "a number": ("POST", CHAT, JSON, b"3", 400, "invalid_type"),
    "not UTF-8": ("POST", TEXT, JSON, b"\xff\xfe", 400, "invalid_json"),
    "two bodies": ("POST", TEXT, JSON, GOOD + GOOD, 400, "invalid_json"),
    "too deep": ("POST", TEXT, JSON, b"[" * 100_000, 400, "invalid_json"),
    "too deep, and closed": (
        "POST",
        CHAT,
        JSON,
        b'{"messages":' + b"[" * 9999 + b"]" * 9999 + b"}",
        400,
        "invalid_json",
    ),
    "packed": ("POST", TEXT, JSON | {"Content-Encoding": "gzip"}, gzip.compress(GOOD), 415, "unsupported_media_type"),
    "a form": (
        "POST",
        TEXT,
        {"Content-Type": "application/x-www-form-urlencoded"},
        b"model=tiny",
        415,
        "unsupported_media_type",
    ),
    "plain text": ("POST", CHAT, {"Content-Type": "text/plain"}, GOOD, 415, "unsupported_media_type"),
    "no type": ("POST", TEXT, {}, GOOD, 415, "unsupported_media_type"),
    "multipart": (
        "POST",
        CHAT,
        {"Content-Type": "multipart/form-data; boundary=x"},
        b"--x--",
        415,
        "unsupported_media_type",
    ),
    "too large": ("POST", TEXT, JSON, BIG, 413, "body_too_large"),
    "too many headers": (
        "POST",
        TEXT,
        JSON | {f"x-{index}": "y" for index in range(140)},
        GOOD,
        431,
        "headers_too_large",
    ),
    "headers too large": (
        "GET",
        "/v1/models",
        {f"x-{index}": "y" * 1000 for index in range(40)},
        b"",
        431,
        "headers_too_large",
    ),
    "path too large": ("GET", "/v1/models/" + "x" * 33_000, {}, b"", 431, "headers_too_large"),
    "no such path": ("GET", "/v1/nothing", {}, b"", 404, "unknown_url"),
    "no such path to post to": ("POST", "/v2/completions", JSON, GOOD, 404, "unknown_url"),
    "up and out": ("GET", "/v1/models/../../etc/passwd%00", {}, b"", 404, "unknown_url"),
    "GET for POST": ("GET", CHAT, {}, b"", 405, "method_not_allowed"),
    "POST for GET": ("POST", "/v1/models", JSON, GOOD, 405, "method_not_allowed"),
    "PUT": ("PUT", TEXT, JSON, GOOD, 405, "method_not_allowed"),
    "DELETE": ("DELETE", "/health", {}, b"", 405, "method_not_allowed"),
    "an unknown method": ("BREW", CHAT, JSON, GOOD, 405, "method_not_allowed"),
    "OPTIONS": ("OPTIONS", CHAT, {}, b"", 405, "method_not_allowed"),
}


@pytest.mark.parametrize("what", BAD_MESSAGES)
def test_invalid_http_messages_are_refused(server: RunningServer, what: str) -> None:
    method, path, headers, body, status, code = BAD_MESSAGES[what]
    expect(server, HTTP.request(method, server.url + path, headers=headers, content=body), status, None, code)


def test_a_large_body_without_a_length_is_refused(server: RunningServer) -> None:
    pieces = (BIG[i : i + 2**16] for i in range(0, len(BIG), 2**16))
    expect(server, HTTP.post(server.url + TEXT, content=pieces, headers=JSON), 413, None, "body_too_large")


def test_an_unknown_model_is_not_found(server: RunningServer) -> None:
    expect(server, server.post(CHAT, {"model": "other", "messages": HELLO}), 404, "model", "model_not_found")
    expect(
        server,
        server.post(TEXT, {"model": "other", "prompt": "hello", "stream": True}),
        404,
        "model",
        "model_not_found",
    )
    expect(server, server.get("/v1/models/other"), 404, "model", "model_not_found")
    expect(server, server.post("/tokenize", {"model": "other", "prompt": "hello"}), 404, "model", "model_not_found")


def test_an_invalid_streaming_request_has_an_error_status(server: RunningServer) -> None:
    expect(
        server,
        server.post(TEXT, {"model": NAME, "prompt": "hello", "stream": True, "top_p": 9}),
        400,
        "top_p",
        "invalid_value",
    )
    expect(
        server, server.post(TEXT, {"model": NAME, "prompt": [1, 10**6], "stream": True}), 400, "prompt", "invalid_value"
    )


def test_the_context_limits_the_output_only_if_max_tokens_is_absent(server: RunningServer) -> None:
    prompt = [5] * 250  # of 256
    answer = server.post(TEXT, {"model": NAME, "prompt": prompt, "ignore_eos": True}).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (6, "length")
    assert server.post(TEXT, {"model": NAME, "prompt": prompt, "max_tokens": 6}).status_code == 200
    response = server.post(TEXT, {"model": NAME, "prompt": prompt, "max_tokens": 7})
    expect(server, response, 400, "max_tokens", "context_length_exceeded")
    assert "maximum context length is 256 tokens" in response.json()["error"]["message"]


def test_a_developer_message_is_a_system_message(server: RunningServer) -> None:
    counts = [
        server.post("/tokenize", {"messages": [{"role": role, "content": "Be brief."}, *HELLO]}).json()["tokens"]
        for role in ("system", "developer")
    ]
    assert counts[0] == counts[1]


def test_null_means_absent(server: RunningServer) -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options", "logprobs", "user"]
    )
    assert server.post(CHAT, {"model": NAME, "messages": HELLO, "max_tokens": 2, **nulls}).status_code == 200
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert server.post(CHAT, {"model": NAME, "messages": parts, "max_tokens": 2}).status_code == 200


def test_no_blocks_or_requests_remain(server: RunningServer) -> None:
    server.post(TEXT, {"model": NAME, "prompt": "hello", "max_tokens": 2})
    server.wait_idle()
    assert server.metric("chairlift_requests_open") == 0
