"""Embeddings, scores and rerankings over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.server.expected_errors import expect
from tests.server.running_server import NAME, RunningServer
from tests.tiny import SENTENCES

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def hf(tiny_folder: Path) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def expected(server: RunningServer, hf: Any, text: str, pooling: str = "mean") -> torch.Tensor:
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    with torch.inference_mode():
        hidden = hf(torch.tensor([tokens])).last_hidden_state[0]
    pooled = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
    return pooled / pooled.norm()


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_transformers(server: RunningServer, hf: Any, encoding: Any, pooling: str) -> None:
    answer = server.client().embeddings.create(
        model=NAME, input=SENTENCES, encoding_format=encoding, extra_body={"pooling": pooling}
    )
    assert [item.index for item in answer.data] == [0, 1, 2, 3]
    for text, item in zip(SENTENCES, answer.data, strict=True):
        vector = item.embedding
        if isinstance(vector, str):  # only the client's default is decoded by it
            import base64
            from array import array

            vector = array("f", base64.b64decode(vector)).tolist()
        found = torch.tensor(vector)
        assert float(found @ expected(server, hf, text, pooling)) > 0.9999
    lengths = [len(server.post("/tokenize", {"prompt": text}).json()["tokens"]) for text in SENTENCES]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)


def test_dimensions_are_cut_before_normalising(server: RunningServer, hf: Any) -> None:
    (item,) = server.client().embeddings.create(model=NAME, input=SENTENCES[0], dimensions=8).data
    whole = expected(server, hf, SENTENCES[0])[:8]
    assert item.embedding == pytest.approx((whole / whole.norm()).tolist(), abs=1e-4)


def test_token_ids_as_input(server: RunningServer) -> None:
    client, tokens = server.client(), server.post("/tokenize", {"prompt": SENTENCES[1]}).json()["tokens"]
    by_text = client.embeddings.create(model=NAME, input=SENTENCES[1]).data[0].embedding
    assert client.embeddings.create(model=NAME, input=tokens).data[0].embedding == pytest.approx(by_text, abs=1e-6)
    assert client.embeddings.create(model=NAME, input=[tokens]).data[0].embedding == pytest.approx(by_text, abs=1e-6)


def test_a_long_list_is_embedded_beside_a_stream(server: RunningServer) -> None:
    """More inputs than may wait in the queue are submitted in parts."""

    async def both() -> tuple[list[openai.types.Embedding], int]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        request = client.completions.create(
            model=NAME, prompt="a", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        texts = [f"lift {number}" for number in range(300)]
        vectors = asyncio.create_task(client.embeddings.create(model=NAME, input=texts))
        pieces = 0
        async for chunk in await request:
            pieces += len(chunk.choices)
        return (await vectors).data, pieces

    items, pieces = asyncio.run(both())
    assert [item.index for item in items] == list(range(300))
    assert pieces > 1
    single = server.client().embeddings.create(model=NAME, input="lift 299").data[0]
    assert items[299].embedding == pytest.approx(single.embedding, abs=1e-5)
    server.wait_idle()


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_are_cosines(server: RunningServer, hf: Any, path: str) -> None:
    answer = server.post(path, {"model": NAME, "text_1": SENTENCES[0], "text_2": SENTENCES}).json()
    vectors = [expected(server, hf, text) for text in SENTENCES]
    assert [item["score"] for item in answer["data"]] == pytest.approx(
        [float(vectors[0] @ vector) for vector in vectors], abs=1e-4
    )
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(4)]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked(server: RunningServer, path: str) -> None:
    documents: list[Any] = [SENTENCES[3], {"text": SENTENCES[1]}, SENTENCES[0]]
    body = {"model": NAME, "query": SENTENCES[1], "documents": documents}
    answer = server.post(path, body).json()
    results = answer["results"]
    scores = [result["relevance_score"] for result in results]
    assert results[0]["index"] == 1
    assert results[0]["document"] == {"text": SENTENCES[1]}
    assert scores == sorted(scores, reverse=True)
    assert {result["index"] for result in results} == {0, 1, 2}
    assert answer["usage"]["total_tokens"] > 0
    (best,) = server.post(path, body | {"top_n": 1, "return_documents": False}).json()["results"]
    assert best == {"index": 1, "relevance_score": pytest.approx(scores[0])}


BAD: list[tuple[str, dict[str, Any], str]] = [
    (PATH, {"input": ""}, "input"),
    (PATH, {"input": []}, "input"),
    (PATH, {"input": [""]}, "input"),
    (PATH, {"input": [[]]}, "input"),
    (PATH, {"input": [1, 10**6]}, "input"),
    (PATH, {"input": [5] * 257}, "input"),
    (PATH, {"input": "\ud800"}, "input"),
    (PATH, {"input": "x" * 10**5}, "input"),
    (PATH, {"input": "a", "dimensions": 0}, "dimensions"),
    (PATH, {"input": "a", "dimensions": 65}, "dimensions"),
    (PATH, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    (PATH, {"input": "a", "pooling": "first"}, "pooling"),
    (PATH, {"input": "a", "normalize": "yes"}, "normalize"),
    (PATH, {"input": "a", "priority": 3}, "priority"),
    (PATH, {"input": ["a"] * 2049}, "input"),
    (PATH, {}, "input"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/v1/score", {"text_1": "", "text_2": "a"}, "text_1"),
    ("/v1/score", {"text_1": "a", "text_2": "x" * 10**5}, "text_2"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    ("/v1/rerank", {"query": "a", "documents": ["a", ""]}, "documents"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD, ids=lambda value: ascii(value)[:50])
def test_bad_bodies_are_refused_by_name(server: RunningServer, path: str, body: dict[str, Any], param: str) -> None:
    expect(server, server.post(path, {"model": NAME, **body}), 400, param)


def test_a_text_may_fill_the_whole_context(server: RunningServer) -> None:
    assert server.post(PATH, {"model": NAME, "input": [5] * 256}).status_code == 200
