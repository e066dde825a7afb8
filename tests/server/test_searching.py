"""best_of and beam search on the real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift import LLM, SamplingParams
from tests.server.running_server import NAME, RunningServer

PROMPT = {"model": NAME, "prompt": "a chairlift never", "max_tokens": 8}


def test_beam_search_matches_the_offline_api(server: RunningServer, tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), progress=False, kv_memory="2MiB")
    params = SamplingParams(beam_width=4, n=2, max_tokens=8, length_penalty=0.5, early_stopping="never")
    expected = llm.generate(["a chairlift never"], params, use_tqdm=False)[0].outputs
    rule = {"n": 2, "length_penalty": 0.5, "early_stopping": "never"}
    for width in ({"beam_width": 4}, {"use_beam_search": True, "best_of": 4}):
        choices = server.post("/v1/completions", PROMPT | rule | width).json()["choices"]
        assert [choice["text"] for choice in choices] == [output.text for output in expected]
        assert [choice["score"] for choice in choices] == pytest.approx([output.score for output in expected], abs=1e-4)
    server.wait_idle()


def test_chat(server: RunningServer) -> None:
    request_body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "when?"}],
        "max_tokens": 6,
        "logprobs": True,
    }
    answer = server.post("/v1/chat/completions", request_body | {"use_beam_search": True, "n": 3}).json()
    scores = [choice["score"] for choice in answer["choices"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    for choice, score in zip(answer["choices"], scores, strict=True):
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert score == pytest.approx(sum(logprobs) / len(logprobs))
    assert answer["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["content"]) for choice in answer["choices"]
    )


def test_best_of(server: RunningServer) -> None:
    body = PROMPT | {"seed": 4, "temperature": 1.0, "logprobs": 0}
    every = server.post("/v1/completions", body | {"n": 5}).json()["choices"]
    best = server.client().completions.create(**body, n=2, best_of=5).choices

    def mean(choice: dict[str, dict[str, list[float]]]) -> float:
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])

    ranked = sorted(every, key=mean, reverse=True)
    assert [choice.text for choice in best] == [choice["text"] for choice in ranked[:2]]


def test_a_search_wider_than_the_batch_is_refused(server: RunningServer) -> None:
    answer = server.post("/v1/completions", PROMPT | {"beam_width": 64, "max_tokens": 200})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "beam_width"
