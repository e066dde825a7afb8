"""Endpoints under the paths that clients write, with the same guards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chairlift.server.access import KeySources, KeyTable
from chairlift.server.batch.folder import FilesFolder
from chairlift.server.http.boundary import endpoint_path
from chairlift.server.wire.limits import Limits
from tests.server.front_end import NAME, FrontEnd, front_end
from tests.server.running_server import HTTP

KEY = {"authorization": "Bearer alices-secret"}
HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 2}
POSTS = [
    ("/chat/completions", CHAT),
    ("//v1/chat/completions", CHAT),
    ("/v1//chat//completions", CHAT),
    ("//chat/completions", CHAT),
    ("/%2Fv1/chat/completions", CHAT),
    ("/completions", {"prompt": "a"}),
    ("/responses", {"input": "a"}),
    ("/messages", CHAT),
    ("/messages/count_tokens", {"messages": HELLO}),
    ("//tokenize", {"prompt": "a"}),
    ("/api//chat", {"messages": HELLO}),
    ("//completion", {"prompt": "a"}),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    folder = tmp_path_factory.mktemp("paths")
    keys = folder / "keys.yaml"
    keys.write_text("alice: {key: alices-secret}\nbob: {key: bobs-secret, requests_per_minute: 3}\n")
    table = KeyTable(KeySources([], keys).read())
    files = FilesFolder(folder / "files", 2**20)
    with front_end(keys=table, limits=Limits(max_body_bytes=5000), files=files) as server:
        yield server


@pytest.mark.parametrize(("path", "body"), POSTS)
def test_an_endpoint_answers_and_is_guarded_under_each_of_its_paths(
    served: FrontEnd, path: str, body: dict[str, Any]
) -> None:
    url = served.url + path
    assert httpx.post(url, json=body).status_code == 401
    answer = httpx.post(url, json=body, headers=KEY)
    assert answer.status_code == 200, answer.text
    assert httpx.post(url, json={**body, "user": "x" * 5000}, headers=KEY).status_code == 413
    refused = httpx.post(url, json={"model": 3}, headers=KEY).json()
    assert (refused.get("type") == "error") == ("messages" in path)  # the form of Anthropic's errors


def test_the_limits_of_a_key_hold_over_all_paths(served: FrontEnd) -> None:
    key = {"authorization": "Bearer bobs-secret"}
    paths = ["/v1/chat/completions", "/chat/completions", "//v1/chat/completions", "/completions"]
    statuses = [httpx.post(served.url + path, json=CHAT, headers=key).status_code for path in paths]
    assert statuses == [200, 200, 200, 429]


@pytest.mark.parametrize("path", ["/models", "//v1/models", "//files", "/batches", "/metrics", "//metrics", "/version"])
def test_pages_need_a_key_under_each_of_their_paths(served: FrontEnd, path: str) -> None:
    assert httpx.get(served.url + path).status_code == 401
    assert httpx.get(served.url + path, headers=KEY).status_code == 200


def test_uploads_are_uploads_under_each_path(served: FrontEnd) -> None:
    """A file may be longer than other bodies."""
    for path in ("/v1/files", "/files", "//v1/files"):
        data = b'{"custom_id": "a"}\n' * 1000
        answer = httpx.post(
            served.url + path, data={"purpose": "batch"}, files={"file": ("a.jsonl", data)}, headers=KEY
        )
        assert answer.status_code == 200, answer.text
        kept = httpx.get(f"{served.url}/files/{answer.json()['id']}/content", headers=KEY)
        assert kept.content == data


def test_probes_need_no_key(served: FrontEnd) -> None:
    for path in ("/", "/ping", "//ping", "/health", "/v1/health", "/ready"):
        assert httpx.get(served.url + path).status_code == 200
        head = HTTP.head(served.url + path)
        assert (head.status_code, head.content) == (200, b"")
    assert httpx.post(f"{served.url}/ping").status_code == 200


def test_other_paths_are_as_they_are_written() -> None:
    for path in (
        "/",
        "//",
        "/v1",
        "/v1/chat",
        "/x//y",
        "/v1/models//a/b",
        "/dashboard/events",
        "/v1/chat/completions/",
    ):
        assert endpoint_path(path) == path
    assert endpoint_path("//v1//models/a//b") == "/v1/models/a//b"
    assert endpoint_path("/models/org/name") == "/v1/models/org/name"
