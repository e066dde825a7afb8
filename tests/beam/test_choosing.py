"""`best_of`, and the parameters of beam search in the API and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift import LLM, SamplingParams
from chairlift.cli.main import app
from chairlift.core.events import Event, RequestFinished, TokenProduced
from chairlift.core.sampling.structure import Structure
from chairlift.errors import InvalidParameter
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = write_tiny_checkpoint(tmp_path_factory.mktemp("choosing"))
    return LLM(str(folder), dtype="float32", progress=False)


def test_best_of_returns_the_completions_with_the_highest_mean_logprob(llm: LLM) -> None:
    prompt, seeded = [[5, 6, 7]], {"seed": 3, "max_tokens": 12, "temperature": 1.5}
    every = llm.generate(prompt, SamplingParams(n=6, logprobs=0, **seeded), use_tqdm=False)[0].outputs
    for with_logprobs in (None, 2):
        params = SamplingParams(n=2, best_of=6, logprobs=with_logprobs, **seeded)
        best = llm.generate(prompt, params, use_tqdm=False)[0].outputs

        def mean(output: Any) -> float:
            return output.cumulative_logprob / len(output.token_ids)

        ranked = sorted(every, key=mean, reverse=True)[:2]
        assert [output.token_ids for output in best] == [output.token_ids for output in ranked]
        assert [output.text for output in best] == [output.text for output in ranked]
        assert [output.score for output in best] == pytest.approx([mean(output) for output in ranked])
        assert [output.cumulative_logprob for output in best] == pytest.approx(
            [output.cumulative_logprob for output in ranked]
        )
        assert [output.index for output in best] == [0, 1]
        for output in best:
            assert (output.logprobs is None) == (with_logprobs is None)


def test_completions_that_are_not_returned_produce_no_token_events(llm: LLM) -> None:
    events: list[Event] = []
    engine = llm.engine
    engine.subscribe(events.extend)
    for search in ({"best_of": 4}, {"beam_width": 4}):
        events.clear()
        (first, second) = engine.submit([5, 6, 7], SamplingParams(n=2, max_tokens=5, **search), request_id="chosen")
        with pytest.raises(InvalidParameter, match="already in use"):
            engine.submit([1], SamplingParams(), request_id="chosen#3")
        while engine.has_work:
            engine.step()
        producers = {event.request_id for event in events if isinstance(event, TokenProduced)}
        assert producers == {first, second}
        ended = [event.request_id for event in events if isinstance(event, RequestFinished)]
        assert sorted(ended) == ["chosen", "chosen#1", "chosen#2", "chosen#3"]
        assert not llm.runner.sampler._requests


@pytest.mark.parametrize("search", [{"best_of": 4}, {"beam_width": 4}])
def test_cancelling_ends_all_completions_within_two_steps(llm: LLM, search: dict[str, int]) -> None:
    engine = llm.engine
    params = SamplingParams(max_tokens=50, ignore_eos=True, **search)
    (only,) = engine.submit([5, 6, 7], params)
    for _ in range(4):
        engine.step()
    assert len(engine.scheduler.running) == 4
    assert engine.cancel(only)
    assert not engine.cancel(only)
    events = [*engine.step(), *engine.step()]
    assert not engine.has_work
    (ended,) = [event for event in events if isinstance(event, RequestFinished) and event.request_id == only]
    assert ended.ending.reason.value == "cancelled"
    assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks


def test_a_deadline_ends_a_search(llm: LLM) -> None:
    result = llm.generate([[5, 6]], SamplingParams(beam_width=3, n=2, max_tokens=200), use_tqdm=False, timeout=1e-9)[0]
    assert [output.finish_reason for output in result.outputs] == ["deadline", "deadline"]


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"beam_width": 1}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "best_of": 3}, "best_of"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "top_p": 0.9}, "top_p"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"beam_width": 2, "logit_bias": {1: 1.0}}, "logit_bias"),
        ({"beam_width": 2, "stop": "end"}, "stop"),
        ({"beam_width": 2, "structure": Structure.regex("a+", "guided_regex")}, "guided_regex"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": "never"}, "early_stopping"),
    ],
)
def test_incompatible_parameters_are_refused(given: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        SamplingParams(**given)
    assert refused.value.parameter == parameter


def test_the_engine_refuses_wide_searches_and_streaming(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="compares 384 tokens, but there are 320") as small:
        llm.generate([[5]], SamplingParams(beam_width=64, stop_token_ids=[7, 8, 9, 10], max_tokens=1), use_tqdm=False)
    assert small.value.parameter == "beam_width"
    for search in ({"best_of": 2}, {"beam_width": 2}):
        with pytest.raises(InvalidParameter, match="cannot be streamed") as streamed:
            llm.stream([[5]], SamplingParams(**search))
        assert streamed.value.parameter in search


def test_beam_search_on_the_command_line(llm: LLM, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    command = ["generate", "a chairlift", "--model", str(folder), "--kv-memory", "4MiB", "--json", "--max-tokens", "6"]
    options = ["--beam-width", "3", "-n", "2", "--length-penalty", "0", "--early-stopping", "never"]
    shown = CliRunner().invoke(app, [*command, *options, "--dtype", "float32"])
    assert shown.exit_code == 0, shown.output
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    params = SamplingParams(beam_width=3, n=2, length_penalty=0.0, early_stopping="never", max_tokens=6)
    expected = llm.generate(["a chairlift"], params, use_tqdm=False)[0].outputs
    assert [line["text"] for line in lines] == [output.text for output in expected]
    assert [line["score"] for line in lines] == pytest.approx([output.score for output in expected])
    refused = CliRunner().invoke(app, [*command, "--beam-width", "3", "--temperature", "0.5"])
    assert refused.exit_code == 2
    assert "temperature" in refused.output
