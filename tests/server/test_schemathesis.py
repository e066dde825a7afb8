"""Requests that the OpenAPI document allows or forbids never cause a 5xx."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from tests.server.expected_errors import check_shape
from tests.server.running_server import NAME, RunningServer

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")  # with errors in Anthropic's format
OLLAMA = ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull")
LLAMACPP = ("/completion", "/infill", "/embedding", "/apply-template")
POSTS = (
    *(*GENERATING, *MESSAGES, "/v1/responses/input_tokens", "/v1/responses/compact", "/tokenize", "/detokenize"),
    *(*OLLAMA, *LLAMACPP),
)
GETS = (
    *("/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics", "/version"),
    *("/api/tags", "/api/ps", "/api/version", "/props", "/slots"),
)
# Refused whatever they are sent.
REFUSED = [(f"/api/{name}", "POST") for name in ("create", "copy", "push")]
REFUSED += [("/api/delete", "DELETE"), ("/props", "POST")]
FILES = [
    ("/v1/files", "POST"),
    ("/v1/files", "GET"),
    ("/v1/files/{file_id}", "GET"),
    ("/v1/files/{file_id}", "DELETE"),
    ("/v1/files/{file_id}/content", "GET"),
    ("/v1/batches", "POST"),
    ("/v1/batches", "GET"),
    ("/v1/batches/{batch_id}", "GET"),
    ("/v1/batches/{batch_id}/cancel", "POST"),
]
MESSAGE_BATCHES = [
    ("/v1/messages/batches", "POST"),
    ("/v1/messages/batches", "GET"),
    ("/v1/messages/batches/{message_batch_id}", "GET"),
    ("/v1/messages/batches/{message_batch_id}", "DELETE"),
    ("/v1/messages/batches/{message_batch_id}/cancel", "POST"),
    ("/v1/messages/batches/{message_batch_id}/results", "GET"),
]
STORED = [
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/responses/{response_id}/cancel", "POST"),
    ("/v1/responses/{response_id}/input_items", "GET"),
    ("/v1/conversations", "POST"),
    ("/v1/conversations/{conversation_id}", "GET"),
    ("/v1/conversations/{conversation_id}", "POST"),
    ("/v1/conversations/{conversation_id}", "DELETE"),
    ("/v1/conversations/{conversation_id}/items", "GET"),
    ("/v1/conversations/{conversation_id}/items", "POST"),
    ("/v1/conversations/{conversation_id}/items/{item_id}", "GET"),
    ("/v1/conversations/{conversation_id}/items/{item_id}", "DELETE"),
]
# Any path is valid, so only bodies have negative cases.
CASES = [(path, "POST", mode) for path in POSTS for mode in GenerationMode]
CASES += [(path, "GET", GenerationMode.POSITIVE) for path in GETS]
CASES += [(path, method, GenerationMode.POSITIVE) for path, method in FILES]
CASES += [(path, method, GenerationMode.POSITIVE) for path, method in (*STORED, *MESSAGE_BATCHES)]
CASES += [("/v1/conversations", "POST", GenerationMode.NEGATIVE)]
CASES += [(path, method, GenerationMode.POSITIVE) for path, method in REFUSED]
CASES += [("/v1/messages/batches", "POST", GenerationMode.NEGATIVE)]
CASES += [("/v1/batches", "POST", GenerationMode.NEGATIVE)]

# Valid values; with generated ones, few requests would pass the check of the model name.
VALID_VALUES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/responses/compact": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/embeddings": {"input": "hello"},
    "/v1/score": {"text_1": "hello", "text_2": "hello"},
    "/v1/rerank": {"query": "hello", "documents": ["hello"]},
    "/api/chat": {"messages": [{"role": "user", "content": "hello"}], "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "hello", "options": {"num_predict": 3}},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
    "/api/show": {"name": None},
    "/api/pull": {"name": None},
    "/completion": {"prompt": "hello", "n_predict": 3},
    "/embedding": {"content": "hello", "input": None},
    "/apply-template": {"messages": [{"role": "user", "content": "hello"}]},
}


def with_valid_values(body: Any, path: str, *, level: int) -> Any:
    """Replace values of a generated body by valid ones, more at higher levels, so that it may reach the engine."""
    if not isinstance(body, dict) or level == 0:
        return body
    body = {**body, "model": NAME}
    if level == 1 or path not in VALID_VALUES:
        return body
    body |= VALID_VALUES[path]
    if level == 3:  # at most one other parameter, since two invalid ones mask each other
        kept = sorted(body.keys() - VALID_VALUES[path].keys() - {"model"})[:1]
        body = {name: body[name] for name in ("model", *VALID_VALUES[path], *kept)}
    return body


def fuzz(server: RunningServer, path: str, method: str, mode: GenerationMode, examples: int, **more: bool) -> None:
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]
    session = requests.Session()
    statuses = Counter[int]()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        **more,
    )
    @given(case=operation.as_strategy(generation_mode=mode), level=st.integers(0, 3))
    def send(case: Case, level: int) -> None:
        if path in POSTS:
            case.body = with_valid_values(case.body, path, level=level)
        response = case.call(base_url=server.url, session=session, timeout=60)
        statuses[response.status_code] += 1
        assert response.status_code < 500, f"{case.as_curl_command()}\n{response.text}"
        assert "server_error" not in response.text, f"{case.as_curl_command()}\n{response.text}"
        assert response.headers["x-request-id"]
        if response.status_code >= 400:
            check_shape(path, response)

    send()
    session.close()
    # /tokenize requires exactly one of two optional parameters; /infill a model with tokens for it.
    if path in POSTS and path not in ("/tokenize", "/infill"):
        assert mode is GenerationMode.NEGATIVE or statuses[200], f"no request was valid: {statuses}"
        # Every body that matches the document names a model, and nothing else.
        assert statuses[400] or path in ("/api/show", "/api/pull"), f"no request was invalid: {statuses}"
    assert server.get("/health").status_code == 200
    server.wait_idle()


@pytest.mark.parametrize(("path", "method", "mode"), CASES, ids=lambda value: str(getattr(value, "value", value)))
def test_no_generated_request_makes_the_server_fail(
    stored_server: RunningServer, path: str, method: str, mode: GenerationMode
) -> None:
    fuzz(stored_server, path, method, mode, 25 if path in POSTS else 4, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method", "mode"), CASES, ids=lambda value: str(getattr(value, "value", value)))
def test_no_generated_request_of_many_makes_the_server_fail(
    stored_server: RunningServer, path: str, method: str, mode: GenerationMode
) -> None:
    fuzz(stored_server, path, method, mode, 500 if path in POSTS else 50)


def test_every_documented_route_is_tested(stored_server: RunningServer) -> None:
    document = stored_server.get("/openapi.json").json()
    served = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert served == {(path, method) for path, method, _ in CASES}
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
