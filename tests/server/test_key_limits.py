"""API keys with limits: the key file, its reload, rate limits and their headers."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from chairlift.errors import InvalidParameter
from chairlift.server.access import Allowance, APIKey, KeyLimits, KeySources, KeyTable, RateLimiter, warn_of_short_keys
from chairlift.server.metrics import Metrics
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Cancel, Submit, ToEngine, Update
from tests.server.front_end import NAME, FrontEnd, ScriptedEngine, front_end, stay_silent
from tests.server.running_server import HTTP, start_server, wait_for
from tests.server.test_listening import make_certificate

ALICE = """
alice:
  key: sk-alice
  requests_per_minute: 3
  tokens_per_minute: 200
bob:
  keys: [sk-bob-old, sk-bob-new]
  concurrent_requests: 2
carol: {key: sk-carol, admin: true}
"""


def keys_in(tmp_path: Path, text: str, name: str = "keys.yaml") -> KeyTable:
    (tmp_path / name).write_text(text)
    return KeyTable(KeySources(file=tmp_path / name).read())


def post(front: FrontEnd, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return HTTP.post(front.url + path, json={"model": NAME, "prompt": "hello", **body}, headers=headers)


# ---- the file ---------------------------------------------------------------------------------------------------


def test_a_key_file_has_names_and_limits(tmp_path: Path) -> None:
    keys = keys_in(tmp_path, ALICE)
    found = {secret: keys.find(secret.encode()) for secret in ("sk-alice", "sk-bob-old", "sk-bob-new", "sk-carol")}
    assert {secret: key and (key.name, key.limits) for secret, key in found.items()} == {
        "sk-alice": ("alice", KeyLimits(requests_per_minute=3, tokens_per_minute=200)),
        "sk-bob-old": ("bob", KeyLimits(concurrent_requests=2)),
        "sk-bob-new": ("bob", KeyLimits(concurrent_requests=2)),
        "sk-carol": ("carol", KeyLimits()),
    }
    assert [key.name for key in keys if key.is_admin] == ["carol"]
    assert keys.find(b"sk-none") is None
    lines = keys_in(tmp_path, "alice sk-1\n\nsk-2\n", "keys.txt")
    assert [key.name for key in lines] == ["alice", "key-2"]
    toml = keys_in(tmp_path, '[alice]\nkey = "sk-1"\nconcurrent_requests = 2\nclass = "batch"\n', "keys.toml")
    assert [(key.limits, key.service_class) for key in toml] == [(KeyLimits(concurrent_requests=2), "batch")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no keys"),
        ("alice: sk-1", "alice: must have the field 'key' or 'keys'"),
        ("alice: {request_per_minute: 1, key: sk-1}", "alice: unknown field 'request_per_minute'"),
        ("alice: {requests_per_minute: 0, key: sk-1}", "requests_per_minute must be an integer of at least 1, got 0"),
        ("alice: {tokens_per_minute: many, key: sk-1}", "tokens_per_minute must be an integer of at least 1"),
        ("alice: {concurrent_requests: true, key: sk-1}", "concurrent_requests must be an integer of at least 1"),
        ("alice: {admin: yes please, key: sk-1}", "alice: admin must be true or false, got 'yes please'"),
        ("alice: {class: 5, key: sk-1}", "alice: class must be the name of a class, got 5"),
        ("alice: {requests_per_minute: 1}", "alice: must have either 'key', a text, or 'keys'"),
        ("alice: {key: sk-1, keys: [sk-2]}", "alice: must have either 'key', a text, or 'keys'"),
        ("alice: {keys: []}", "alice: must have either 'key', a text, or 'keys'"),
        ("'': {key: sk-1}", "each key must have a name"),
        ("alice: {key: 123}", "alice: keys must be texts; put them in quotes"),
        ("alice: {key: ''}", "must be non-empty ASCII"),
        ("alice: {key: sk-1}\nbob: {key: sk-1}", "the key of 'bob' is given twice"),
        ("alice: [", "is not YAML"),
    ],
)
def test_errors_in_a_key_file_name_what_is_wrong(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        keys_in(tmp_path, text)
    assert problem in str(refusal.value)
    assert "sk-1" not in str(refusal.value)


def test_short_keys_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_short_keys(KeySources(["alice a", "bob " + "b" * 16]).read())
    (record,) = caplog.records
    assert "the API key of 'alice' has fewer than 16 characters" in record.getMessage()


def test_a_server_with_a_bad_key_file_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    command = [sys.executable, "-m", "chairlift", "serve", "--api-key-file", str(tmp_path / "keys")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: --api-key-file: '{tmp_path / 'keys'}' has no keys\n"


# ---- limits, with a clock of the test -----------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def limiter_for(clock: Clock) -> RateLimiter:
    return RateLimiter(Metrics(), clock)


def refusal_of(call: Any) -> APIError:
    with pytest.raises(APIError) as refusal:
        asyncio.run(call)
    assert refusal.value.status_code == 429
    return refusal.value


def test_requests_per_minute_refill_steadily() -> None:
    clock, key = Clock(), APIKey("alice", b"", KeyLimits(requests_per_minute=6))
    limiter = limiter_for(clock)
    headers = [asyncio.run(limiter.begin(key)).headers for _ in range(6)]
    assert [one["x-ratelimit-remaining-requests"] for one in headers] == ["5", "4", "3", "2", "1", "0"]
    assert headers[0]["x-ratelimit-limit-requests"] == "6"
    assert [headers[0]["x-ratelimit-reset-requests"], headers[5]["x-ratelimit-reset-requests"]] == ["10s", "1m0s"]
    refused = refusal_of(limiter.begin(key))
    assert refused.headers is not None
    assert refused.headers["Retry-After"] == "10"
    assert refused.body["error"]["code"] == "rate_limit_exceeded"
    clock.now += 9.9
    refusal_of(limiter.begin(key))
    clock.now += 0.2
    asyncio.run(limiter.begin(key))
    refusal_of(limiter.begin(key))
    clock.now += 3600  # unused minutes are not saved up
    for _ in range(6):
        asyncio.run(limiter.begin(key))
    refusal_of(limiter.begin(key))


def test_tokens_are_charged_first_and_unused_ones_given_back() -> None:
    clock, key = Clock(), APIKey("alice", b"", KeyLimits(tokens_per_minute=600))
    limiter = limiter_for(clock)
    first, second = (asyncio.run(limiter.begin(key)) for _ in range(2))

    def remaining(grant: Allowance, tokens: int) -> str:
        asyncio.run(limiter.charge(grant, tokens))
        return grant.headers["x-ratelimit-remaining-tokens"]

    assert remaining(first, 500) == "100"
    refused = refusal_of(limiter.charge(second, 150))
    assert refused.headers is not None
    assert refused.headers["Retry-After"] == "5"  # 50 tokens at 10 per second
    limiter.end(first, 450)
    assert remaining(second, 150) == "400"
    limiter.end(second, -500)  # used more than charged
    third = asyncio.run(limiter.begin(key))
    refusal_of(limiter.charge(third, 1))
    clock.now += 11
    assert remaining(third, 10) == "0"
    too_large = refusal_of(limiter.charge(third, 601))
    assert too_large.headers is not None
    assert "Retry-After" not in too_large.headers
    assert "may need 601" in str(too_large.detail)


def test_concurrent_requests_of_all_keys_of_a_name_count_together() -> None:
    old, new = (APIKey("bob", digest, KeyLimits(concurrent_requests=2)) for digest in (b"1", b"2"))
    limiter = limiter_for(Clock())
    asyncio.run(limiter.begin(old))
    second = asyncio.run(limiter.begin(new))
    refusal_of(limiter.begin(old))
    limiter.end(second, 0)
    asyncio.run(limiter.begin(old))


def test_new_limits_of_a_key_take_effect_and_keep_its_open_requests() -> None:
    limiter = limiter_for(Clock())
    before, after = (APIKey("a", b"", KeyLimits(concurrent_requests=count)) for count in (5, 2))
    grants = [asyncio.run(limiter.begin(before)) for _ in range(2)]
    refusal_of(limiter.begin(after))
    limiter.end(grants[0], 0)
    asyncio.run(limiter.begin(after))


# ---- over HTTP ----------------------------------------------------------------------------------------------------


def test_a_limited_key_gets_429_with_openais_headers(tmp_path: Path) -> None:
    with front_end(keys=keys_in(tmp_path, ALICE)) as front:
        first = post(front, "sk-alice", max_tokens=10)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert first.headers["x-ratelimit-limit-tokens"] == "200"
        charged = first.json()["usage"]["prompt_tokens"] + 10
        assert 200 - charged <= int(first.headers["x-ratelimit-remaining-tokens"]) < 200
        assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
        streamed = post(front, "sk-alice", max_tokens=150, stream=True)  # 8 of the 10 tokens were given back
        assert streamed.status_code == 200
        assert int(streamed.headers["x-ratelimit-remaining-tokens"]) >= 200 - (charged - 8) - (charged + 140)
        too_large = post(front, "sk-alice", max_tokens=220)
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "retry-after" not in too_large.headers
        refused = post(front, "sk-alice")
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert error == {
            "message": "the limit of this API key is reached: 3 requests per minute",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert 0 < int(refused.headers["retry-after"]) <= 20
        assert refused.headers.get_list("x-ratelimit-remaining-requests") == ["0"]
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="sk-alice", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model=NAME, prompt="hello")
        listed = HTTP.get(front.url + "/v1/models", headers={"authorization": "Bearer sk-alice"})
        assert listed.status_code == 200  # only POST requests count
        other = post(front, "sk-carol")
        assert other.status_code == 200
        assert not any(name.startswith("x-ratelimit") for name in other.headers)
        assert front.metric("requests_rate_limited_total", key="alice", limit="requests") == 2
        assert front.metric("requests_rate_limited_total", key="alice", limit="tokens") == 1


def test_refused_requests_cost_no_tokens(tmp_path: Path) -> None:
    with front_end(keys=keys_in(tmp_path, "alice: {key: sk-1, tokens_per_minute: 100}")) as front:
        for _ in range(5):
            assert post(front, "sk-1", max_tokens=90, n=0).status_code == 400
            assert post(front, "sk-1", max_tokens=50, timeout=-1).status_code == 400
        assert post(front, "sk-1", max_tokens=90).status_code == 200


def test_concurrent_requests_are_freed_when_a_client_disconnects(tmp_path: Path) -> None:
    with front_end(stay_silent, keys=keys_in(tmp_path, ALICE)) as front:
        sending = threading.Thread(target=post, args=(front, "sk-bob-old"))
        sending.start()
        wait_for(lambda: len(front.engine.received) == 1, "the first request to be accepted")
        body = {"model": NAME, "prompt": "hello"}
        front.post_and_disconnect("/v1/completions", body, authorization="Bearer sk-bob-new")
        wait_for(lambda: len(front.engine.received) == 3, "the cancellation")  # two Submits and a Cancel
        hanging = threading.Thread(target=post, args=(front, "sk-bob-new"))
        hanging.start()
        wait_for(lambda: len(front.engine.received) == 4, "the third request to be accepted")
        refused = post(front, "sk-bob-old")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        for message in front.engine.received:
            if isinstance(message, Submit):
                front.engine.publish(Update(message.request_id, finish_reason="length"))
        for thread in (sending, hanging):
            thread.join(60)


def write_much(engine: ScriptedEngine, message: ToEngine) -> None:
    """Generates 1,000 tokens, whose text fits into no buffers of sockets."""
    if isinstance(message, Submit):
        for number in range(20):
            engine.publish(Update(message.request_id, text="x" * 2**21, tokens=[5] * 50), after=0.1 * number)


def leave_unread(front: FrontEnd, url: str, key: str) -> None:
    """Begin a stream, read nothing of it and leave once its tokens are generated."""
    body = json.dumps({"model": NAME, "prompt": "hello", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        connection.sendall(head.encode() + body)
        wait_for(lambda: front.metric("output_tokens_total") == 1000, "the tokens")


def test_tokens_that_a_client_does_not_read_are_charged(tmp_path: Path) -> None:
    keys = keys_in(tmp_path, "alice: {key: sk-1, tokens_per_minute: 2000}")
    with front_end(write_much, keys=keys) as front:
        leave_unread(front, front.url, "sk-1")
        wait_for(lambda: any(isinstance(message, Cancel) for message in front.engine.received), "the cancellation")
        wait_for(lambda: tokens_left(front, "sk-1") < 1100, "the tokens to be charged")


def tokens_left(front: FrontEnd, key: str) -> int:
    """Those of a key; asking costs a request without tokens, since its body is refused."""
    return int(post(front, key, n=0).headers["x-ratelimit-remaining-tokens"])


# ---- reloading ----------------------------------------------------------------------------------------------------


def test_sighup_reads_the_keys_and_the_certificate_again(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("alice: {key: sk-1}\n")
    make_certificate(tmp_path, "first")
    options = ["--api-key-file", str(file), "--ssl-certfile", str(tmp_path / "cert.pem")]
    running = start_server(
        tiny_folder, tmp_path / "log", *options, "--ssl-keyfile", str(tmp_path / "key.pem"), "--api-key", "root sk-0"
    )

    def status(key: str) -> int:
        return HTTP.get(running.url + "/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    def certificate() -> bytes:
        with httpx.Client(verify=False) as client, client.stream("GET", running.url + "/health") as answer:
            return answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert(True)

    try:
        first = certificate()
        assert [status(key) for key in ("sk-0", "sk-1", "sk-2")] == [200, 200, 401]
        file.write_text("bob: {key: sk-2}\n")
        make_certificate(tmp_path, "second")
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: [status(key) for key in ("sk-0", "sk-1", "sk-2")] == [200, 401, 200], "the new keys")
        assert certificate() != first
        file.write_text("bob: {}\n")
        running.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "nothing is changed" in running.log.read_text(), "the error in the log")
        assert [status(key) for key in ("sk-0", "sk-1", "sk-2")] == [200, 401, 200]
    finally:
        assert running.stop() == 0, running.tail()


def test_texts_that_are_only_tokenized_are_charged(tmp_path: Path) -> None:
    with front_end(keys=keys_in(tmp_path, "alice: {key: sk-alice, tokens_per_minute: 1000}")) as front:
        answer = post(front, "sk-alice", "/tokenize", prompt="a" * 400)  # a token each
        assert answer.json()["count"] == 400
        rest = post(front, "sk-alice", "/detokenize", prompt=None, tokens=[5] * 100)
        assert 480 <= int(rest.headers["x-ratelimit-remaining-tokens"]) <= 620  # before the second one's end
        refused = post(front, "sk-alice", "/tokenize", prompt="a" * 4000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "this request alone may need" in refused.json()["error"]["message"]
