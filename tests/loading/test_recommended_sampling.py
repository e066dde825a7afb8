"""What a model recommends for sampling, wherever requests leave it out."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.errors import InvalidParameter
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.known_models import WheelModel, known_models
from chairlift.loading.recommended_sampling import default_sampling
from chairlift.server.config import ServerConfig
from chairlift.server.front_end import load_served_model
from chairlift.server.wire.messages import Submit
from tests.loading.small_files import write_small_gguf
from tests.server.front_end import NAME, front_end
from tests.server.running_server import HTTP
from tests.tiny import write_tiny_checkpoint

SETTINGS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
ALL = SETTINGS | {"min_p": 0.05, "repetition_penalty": 1.05}


def recommend(folder: Path, settings: dict[str, Any]) -> str:
    """Write the settings as the generation config of a tiny checkpoint."""
    if not folder.exists():
        write_tiny_checkpoint(folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            SETTINGS | {"min_p": 0.05, "repetition_penalty": 1.05},
            SETTINGS | {"min_p": 0.05, "repetition_penalty": 1.05},
        ),
        (
            {"temperature": 0.6, "top_k": -1, "top_p": "x", "min_p": True, "eos_token_id": 3},
            {"temperature": 0.6, "top_k": -1},
        ),
        ({"temperature": -7, "top_p": None}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"temperature": 10**400}, {}),
        ({}, {}),
    ],
)
def test_a_generation_config_is_read_and_wrong_values_are_said(
    settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_sampling(tmp_path, settings) == expected
    wrong = [name for name in ("temperature", "top_p", "min_p") if settings.get(name) in ("x", True, -7, 10**400)]
    assert [f"{tmp_path} recommends is not used: {name}: must be" in caplog.text for name in wrong] == [True] * len(
        wrong
    )
    assert len(caplog.records) == len(wrong)


def test_a_known_model_is_recognised_by_its_file() -> None:
    known = known_models()[0]
    assert isinstance(known, WheelModel)
    assert default_sampling(known.path, {}) == known.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert default_sampling(known.path, {}, "none") == {}


def test_metadata_of_gguf_files(tmp_path: Path) -> None:
    def edit(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_float32("general.sampling.top_p", 0.8)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.penalty_repeat", 1.05)

    checkpoint = open_checkpoint(write_small_gguf(tmp_path / "small.gguf", edit))
    expected = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    assert default_sampling(checkpoint.path, checkpoint.generation_config) == expected


def test_a_file_of_the_user_must_be_right(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    for source in (str(file), str(tmp_path)):
        with pytest.raises(InvalidParameter, match="generation_config: must be auto, none, or a file of parameters"):
            EngineConfig(generation_config=source)
    for content in ("{", "[]"):
        file.write_text(content)
        with pytest.raises(InvalidParameter, match=r"generation_config: must be .*generation_config\.json"):
            EngineConfig(generation_config=str(tmp_path))
    file.write_text(json.dumps({"top_p": 3}))
    with pytest.raises(InvalidParameter, match=r"generation_config\.json: top_p: must be"):
        EngineConfig(generation_config=str(tmp_path))
    file.write_text(json.dumps(SETTINGS))
    for source in (str(file), str(tmp_path)):
        EngineConfig(generation_config=source)
        assert default_sampling(Path("any"), {"temperature": 0.1}, source) == SETTINGS


def test_defaults_fill_what_is_left_out_unless_nothing_is_sampled() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    with_defaults = SamplingParams.with_defaults
    assert with_defaults(defaults, top_p=1.0) == SamplingParams(temperature=0.6, top_p=1.0, repetition_penalty=1.1)
    assert with_defaults(defaults, temperature=0) == SamplingParams(temperature=0)
    assert with_defaults(defaults, beam_width=2) == SamplingParams(beam_width=2)
    assert with_defaults({"temperature": 0.0}) == SamplingParams(temperature=0.0)


# ---- who uses them ------------------------------------------------------------------------------------------------


def test_offline_calls_without_parameters_use_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = recommend(tmp_path / "tiny", {"do_sample": False})
    with caplog.at_level(logging.INFO, "chairlift"):
        llm = LLM(model, kv_memory="2MiB", progress=False)
    assert "sampling   temperature 0 where requests leave it out, from the model" in caplog.text
    prompt, messages = "a chairlift", [{"role": "user", "content": "hello"}]
    greedy = llm.get_default_sampling_params()
    assert greedy == SamplingParams(temperature=0.0)
    answers = {llm.generate(prompt, params)[0].outputs[0].text for params in (None, None, greedy)}
    assert len(answers) == 1
    unlimited = greedy.clone(max_tokens=None)  # as a chat completion without max_tokens
    assert len({llm.chat(messages, params)[0].outputs[0].text for params in (None, None, unlimited)}) == 1
    streams = ["".join(piece.text for piece in llm.stream_chat(messages, params)) for params in (None, unlimited)]
    assert streams[0] == streams[1]
    hot = SamplingParams(temperature=100, ignore_eos=True)  # what a caller gives is used as it is
    assert len({llm.generate(prompt, hot)[0].outputs[0].text for _ in range(4)}) > 1

    async def answers_of_tasks() -> set[str]:
        async with AsyncLLM(model, kv_memory="2MiB", progress=False) as shared:
            assert shared.get_default_sampling_params() == greedy
            return {(await shared.generate(prompt)).outputs[0].text for _ in range(2)}

    assert asyncio.run(answers_of_tasks()) == answers
    assert LLM(model, kv_memory="2MiB", generation_config="none").get_default_sampling_params() == SamplingParams()


def test_a_front_end_knows_them(tmp_path: Path) -> None:
    model = recommend(tmp_path / "tiny", SETTINGS)
    other = recommend(tmp_path / "other", {"temperature": 0.1})
    for source, expected in (("auto", SETTINGS), ("none", {}), ("vllm", {}), (other, {"temperature": 0.1})):
        assert (
            load_served_model(ServerConfig(model, engine={"generation_config": source})).defaults.sampling == expected
        )
    assert load_served_model(ServerConfig(model)).defaults.sampling == SETTINGS


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ],
)
def test_every_endpoint_fills_what_a_request_leaves_out(path: str, body: dict[str, Any]) -> None:
    given: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"temperature": 0}, {"temperature": 1.0, "top_p": 1.0}]
    with front_end(sampling={"temperature": 0.2, "top_p": 0.8}) as server:
        answers = [HTTP.post(server.url + path, json={"model": NAME, **body, **more}).json() for more in given]
        sent = [message.params for message in server.engine.received if isinstance(message, Submit)]
    expected = [(0.2, 0.8), (0.9, 0.8), (0.0, 1.0), (1.0, 1.0)]
    assert [(params.temperature, params.top_p) for params in sent] == expected
    if path == "/v1/responses":
        assert [(answer["temperature"], answer["top_p"]) for answer in answers] == expected
