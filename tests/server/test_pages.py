"""The front page, the page of the endpoints, and hints for paths that do not exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chairlift.server.http.errors import PathHints
from tests.server.front_end import NAME, FrontEnd, front_end
from tests.server.running_server import HTTP

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end() as server:
        yield server


def get(front: FrontEnd, path: str, **headers: str) -> httpx.Response:
    return HTTP.get(front.url + path, headers=headers)


def test_browsers_get_a_page_and_programs_json(served: FrontEnd) -> None:
    page, answer = get(served, "/", **BROWSER), get(served, "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "script" not in page.headers["content-security-policy"]
    assert page.headers["vary"] == answer.headers["vary"] == "Accept"
    links = answer.json()["links"]
    assert links.keys() == {"dashboard", "docs", "openapi", "models", "health", "metrics"}
    for path in links.values():
        assert f'href="{path[1:]}"' in page.text
        assert get(served, path).status_code == 200
    assert answer.json()["model"] == NAME
    assert NAME in page.text


def test_the_command_on_the_page_is_answered(served: FrontEnd) -> None:
    (text,) = re.findall(r"<pre[^>]*>(.*?)</pre>", get(served, "/", **BROWSER).text, re.DOTALL)
    words = shlex.split(text.replace("&#x27;", "'").replace("&quot;", '"'))
    assert words[0] == "curl"
    assert HTTP.post(words[1], json=json.loads(words[-1])).status_code == 200


def test_a_server_with_keys_does_not_tell_what_it_serves() -> None:
    with front_end(api_keys=["alice one"], dashboard=False) as front:
        for accept in (BROWSER, {}):
            assert NAME not in get(front, "/", **accept).text
            assert NAME in get(front, "/", authorization="Bearer one", **accept).text
            assert "/dashboard" not in get(front, "/", **accept).text
        page = get(front, "/", **BROWSER, host="x$(id)").text
        assert "$(id)" not in page
        assert "$API_KEY" in page
        assert get(front, "/docs").status_code == 200
        assert get(front, "/openapi.json").status_code == 401
        assert get(front, "/v1/chat/completion").status_code == 401


def test_all_documented_endpoints_are_on_the_page_which_loads_nothing(served: FrontEnd) -> None:
    page, document = get(served, "/docs"), get(served, "/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f'<b class="{method}">{method.upper()}</b> <code>{path}</code>' in page.text
    assert "<code>repetition_penalty</code>" in page.text
    assert not re.search(r'(?:src|href)="(?:https?:)?//|<script', page.text)


HINTS = {
    "/v1/chat/completion": "POST /v1/chat/completions?",
    "/v1/chat": "POST /v1/chat/completions?",
    "/v1/chatcompletions": "POST /v1/chat/completions?",
    "/v1/v1/chat/completions": "POST /v1/chat/completions?",
    "/openai/v1/embedding": "POST /v1/embeddings?",
    "/V1/Models": "GET /v1/models?",
    "/health/": "GET /health?",
    "/completions/": "POST /v1/completions?",
    "/v1/audio/speech": "no speech",
    "/ui": "is at /dashboard",
    "/redoc": "/openapi.json",
    "/nothing": "listed at /docs",
}


@pytest.mark.parametrize("path", HINTS)
def test_an_unknown_path_gets_a_hint(served: FrontEnd, path: str) -> None:
    answer = get(served, path)
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, "unknown_url", "invalid_request_error")
    assert HINTS[path] in error["message"]


def test_a_wrong_method_is_told_the_right_one(served: FrontEnd) -> None:
    answer = get(served, "/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "takes POST, not GET" in answer.json()["error"]["message"]


def test_a_hint_compares_and_quotes_little_of_a_long_path(served: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(PathHints, "_closest", lambda _, path: compared.append(path))
    answer = get(served, "/" + "v1/" * 5000)
    assert [len(path) for path in compared] == [100]
    assert len(answer.content) < 400


def test_the_dashboard_is_missed_where_it_is_off() -> None:
    with front_end(dashboard=False) as front:
        assert "--no-dashboard" in get(front, "/dashboard").json()["error"]["message"]
