"""An encoder behind the server: embeddings with prompts by name, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.test_encoders import encoded, reference, write_encoder
from tests.server.running_server import RunningServer, start_server


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path, object]]:
    folder = tmp_path_factory.mktemp("encoder")
    model = write_encoder(folder, "bert", "ForSequenceClassification", num_labels=1)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "many sequences "}}))
    running = start_server(folder, tmp_path_factory.mktemp("encoder_server") / "log")
    yield running, folder, model
    running.process.terminate()
    running.process.wait(30)


def test_embeddings_and_rerankings(encoder: tuple[RunningServer, Path, object]) -> None:
    server, folder, model = encoder
    body = {"input": ["a chairlift", "never stops"], "prompt_name": "query", "pooling": "cls", "dimensions": 16}
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    for text, item in zip(body["input"], answer.json()["data"], strict=True):
        exact = reference(model.bert, folder, f"many sequences {text}", "cls")[:16]  # type: ignore[attr-defined]
        assert float(torch.cosine_similarity(torch.tensor(item["embedding"]), exact, dim=0)) > 0.99999
    documents = ["finished requests step off", "a", "one ragged batch"]
    results = server.post("/v1/rerank", {"query": "a chairlift", "documents": documents}).json()["results"]
    for result in results:
        with torch.inference_mode():
            number = model(**encoded(folder, "a chairlift", documents[result["index"]])).logits[0, 0]  # type: ignore[operator]
        assert result["relevance_score"] == pytest.approx(float(number.sigmoid()), abs=1e-4)
    scores = server.post("/v1/score", {"text_1": "a chairlift", "text_2": documents}).json()["data"]
    assert {each["index"]: each["score"] for each in scores} == pytest.approx(
        {each["index"]: each["relevance_score"] for each in results}
    )


def test_what_is_refused(encoder: tuple[RunningServer, Path, object]) -> None:
    server = encoder[0]
    unknown = server.post("/v1/embeddings", {"input": "a", "prompt_name": "passage"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "prompt_name")
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 4}).status_code == 400
