"""What a request leaves out is the same in the server's APIs, `LLM`, `AsyncLLM` and the commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.errors import InvalidParameter
from chairlift.loading.request_defaults import RequestDefaults, parse_overrides, parse_presets
from chairlift.outputs import ChatFormat
from chairlift.server.config import ServerConfig
from chairlift.server.front_end import load_served_model
from chairlift.server.wire.messages import Submit
from chairlift.text.tokenizer import Tokenizer
from tests.api.cli_runner import run
from tests.server.front_end import NAME, FrontEnd, front_end
from tests.server.running_server import HTTP
from tests.tiny import CHATML, byte_level_tokenizer, write_tiny_checkpoint

PRESETS = {
    "precise": {"temperature": 0, "system": "Be brief."},
    "creative": {"temperature": 1.2, "min_p": 0.1, "stop": ["the end"]},
}
OPTIONS: dict[str, Any] = {
    "override_generation_config": {"top_p": 0.8},
    "system_prompt": "You are a chairlift.",
    "presets": PRESETS,
    "kv_memory": "2MiB",
}
RECOMMENDED = {"temperature": 0.6, "top_k": 20, "stop_strings": ["END"], "eos_token_id": [2, 7]}
TEXT = "hello"
QUESTION = [{"role": "user", "content": TEXT}]
WITH_SYSTEM = [{"role": "system", "content": "Sing."}, *QUESTION]
Sent = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return str(folder)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[FrontEnd]:
    served = load_served_model(ServerConfig(model, engine=OPTIONS))
    with front_end(tokenizer=served.tokenizer, defaults=served.defaults) as server:
        yield server


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, progress=False, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """What engines of this process get; they generate one token."""
    requests: list[Sent] = []
    submit = Engine.submit

    def record(self: Engine, prompt: Any, params: SamplingParams, **more: Any) -> list[str]:
        requests.append((list(prompt), params))
        return submit(self, prompt, params.clone(max_tokens=1), **more)

    monkeypatch.setattr(Engine, "submit", record)
    return requests


def post(server: FrontEnd, path: str, body: dict[str, Any]) -> Sent:
    response = HTTP.post(server.url + path, json={"model": NAME, "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    message = [one for one in server.engine.received if isinstance(one, Submit)][-1]
    return message.prompt, message.params


def of_server(server: FrontEnd, messages: list[dict[str, str]], **more: Any) -> list[Sent]:
    """One conversation through every API, and as the playground sends it."""
    system = {"system": messages[0]["content"]} if messages[0]["role"] == "system" else {}
    instructions = {"instructions": system["system"]} if system else {}
    limit = {"max_output_tokens": 8, "max_tokens": None}
    question = [message for message in messages if message["role"] != "system"]
    return [
        post(server, "/v1/chat/completions", {"messages": messages, **more}),
        post(server, "/v1/chat/completions", {"messages": messages, "stream": True, "user": "playground", **more}),
        post(server, "/v1/responses", {"input": TEXT, **instructions, **limit, **more}),
        post(server, "/v1/messages", {"messages": question, **system, **more}),
    ]


def of_python(model: str, llm: LLM, sent: list[Sent], messages: Any, preset: str | None) -> list[Sent]:
    """The same conversation through `LLM`, `AsyncLLM`, `chairlift chat` and `run`."""
    shorter = llm.get_default_sampling_params(preset).clone(max_tokens=8)
    llm.chat(messages, shorter, preset=preset, use_tqdm=False)
    list(llm.stream_chat(messages, shorter, preset=preset))

    async def chat() -> None:
        async with AsyncLLM(model, progress=False, **OPTIONS) as shared:
            await shared.chat(messages, shorter, preset=preset)

    asyncio.run(chat())
    system = ["--system", messages[0]["content"]] if messages[0]["role"] == "system" else []
    command_line(model, "chat", *system, preset=preset, stdin=TEXT)
    command_line(model, "run", TEXT, *system, preset=preset)
    return sent


def command_line(model: str, *arguments: str, preset: str | None, stdin: str = "") -> None:
    config = Path(model) / "config.yaml"
    config.write_text(json.dumps(OPTIONS))
    chosen = [] if preset is None else ["--preset", preset]
    options = ["--model", model, "--config", str(config), "--max-tokens", "8", "--quiet", *chosen]
    result = run(*arguments, *options, stdin=stdin)
    assert result.exit_code == 0, result.stderr


EXPECTED = {
    None: {"temperature": 0.6, "top_k": 20, "top_p": 0.8},
    "precise": {"temperature": 0},
    "creative": {"temperature": 1.2, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "stop": ["the end"]},
}


@pytest.mark.parametrize("messages", [QUESTION, WITH_SYSTEM], ids=["without system", "with system"])
@pytest.mark.parametrize("preset", EXPECTED)
def test_a_conversation_is_the_same_request_everywhere(
    preset: str | None, messages: Any, model: str, server: FrontEnd, llm: LLM, sent: list[Sent]
) -> None:
    default = "Be brief." if preset == "precise" else "You are a chairlift."
    system = [] if messages[0]["role"] == "system" else [{"role": "system", "content": default}]
    expected = [
        llm.get_tokenizer().encode_chat([*system, *messages])[1],
        SamplingParams(**EXPECTED[preset], max_tokens=8),
    ]
    chosen = [{}] if preset is None else [{"preset": preset}, {"model": f"{NAME}:{preset}"}]
    requests = [request for choice in chosen for request in of_server(server, messages, **choice)]
    requests += of_python(model, llm, sent, messages, preset)
    assert [[prompt, params] for prompt, params in requests] == [expected] * len(requests)
    assert len(sent) == 5


@pytest.mark.parametrize("preset", EXPECTED)
def test_a_plain_prompt_is_the_same_request_everywhere(
    preset: str | None, model: str, server: FrontEnd, llm: LLM, sent: list[Sent]
) -> None:
    expected = (llm.get_tokenizer().encode(TEXT), SamplingParams(**EXPECTED[preset], max_tokens=8))
    shorter = llm.get_default_sampling_params(preset).clone(max_tokens=8)
    llm.generate(TEXT, shorter, use_tqdm=False)
    list(llm.stream(TEXT, shorter))
    command_line(model, "generate", TEXT, preset=preset)
    model_name = NAME if preset is None else f"{NAME}:{preset}"
    of_llamacpp = post(server, "/completion", {"prompt": TEXT, "model": model_name, "n_predict": 8, "max_tokens": None})
    assert [post(server, "/v1/completions", {"prompt": TEXT, "preset": preset}), of_llamacpp, *sent] == [expected] * 5


def test_calls_without_parameters_are_as_requests_without_any(
    server: FrontEnd, llm: LLM, sent: list[Sent], model: str
) -> None:
    requests = [
        post(server, "/v1/completions", {"prompt": TEXT, "max_tokens": None, "preset": "creative"}),
        post(server, "/v1/chat/completions", {"messages": QUESTION, "max_tokens": None, "preset": "creative"}),
    ]
    llm.generate(TEXT, preset="creative", use_tqdm=False)
    list(llm.stream(TEXT, preset="creative"))
    llm.chat(QUESTION, preset="creative", use_tqdm=False)
    list(llm.stream_chat(QUESTION, preset="creative"))

    async def both() -> None:
        async with AsyncLLM(model, progress=False, **OPTIONS) as shared:
            await shared.generate(TEXT, preset="creative")
            await shared.chat(QUESTION, preset="creative")

    asyncio.run(both())
    assert [request[1].max_tokens for request in requests] == [16, None]
    assert sent == [requests[0]] * 2 + [requests[1]] * 2 + requests


def test_a_request_comes_before_its_preset(server: FrontEnd) -> None:
    def params(**given: Any) -> SamplingParams:
        return post(server, "/v1/completions", {"prompt": TEXT, "preset": "creative", **given})[1]

    assert params(temperature=0.1, stop="x") == SamplingParams(
        temperature=0.1, top_k=20, top_p=0.8, min_p=0.1, stop="x", max_tokens=8
    )
    assert params(temperature=0) == SamplingParams(temperature=0, stop="the end", max_tokens=8)
    assert params(beam_width=2) == SamplingParams(beam_width=2, max_tokens=8)
    assert params(stop=[]).stop_strings == ()


def test_presets_are_names_of_the_model(server: FrontEnd) -> None:
    listed = [card["id"] for card in HTTP.get(server.url + "/v1/models").json()["data"]]
    assert listed == [NAME, f"{NAME}:precise", f"{NAME}:creative"]
    assert HTTP.get(f"{server.url}/v1/models/{NAME}:precise").status_code == 200
    tokens = [
        HTTP.post(server.url + "/tokenize", json={"model": name, "messages": QUESTION}).json()["count"]
        for name in (NAME, f"{NAME}:precise")
    ]
    assert tokens[0] > tokens[1]  # The system prompt of the preset is the shorter one.


@pytest.mark.parametrize(
    ("given", "status", "problem"),
    [
        ({"preset": "precice"}, 400, "preset: unknown 'precice'; choose from precise, creative"),
        ({"model": f"{NAME}:precice"}, 404, f"this server has '{NAME}', '{NAME}:precise', '{NAME}:creative'"),
        ({"model": "other:precise"}, 404, "the model 'other:precise' does not exist"),
        ({"model": f"{NAME}:precise", "preset": "creative"}, 400, "but the model's name asks for 'precise'"),
        ({"presett": "precise"}, 400, "did you mean 'preset'?"),
    ],
)
def test_unknown_presets_are_refused_with_the_list(
    given: dict[str, Any], status: int, problem: str, server: FrontEnd
) -> None:
    for path, body in (("/v1/completions", {"prompt": TEXT}), ("/v1/chat/completions", {"messages": QUESTION})):
        response = HTTP.post(server.url + path, json={"model": NAME, **body, **given})
        assert (response.status_code, problem in response.text.replace('\\"', "'")) == (status, True), response.text


def test_unknown_presets_raise_in_python_and_commands(llm: LLM) -> None:
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(InvalidParameter, match="preset: unknown 'precice'; choose from precise, creative"):
            call(QUESTION, preset="precice")
    with pytest.raises(InvalidParameter, match="preset: was given together with sampling_params"):
        llm.generate(TEXT, SamplingParams(), preset="precise")
    for command in (["generate", TEXT, "--model", "no-such-model"], ["chat", "no-such-model"]):
        result = run(*command, "--preset", "precise")  # It is refused before anything is loaded.
        assert (result.exit_code, "--preset: unknown 'precise'; there are none" in result.stderr) == (2, True)


# ---- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("presets", {"a b": {}}, "'a b' is no name"),
        ("presets", {"a": 3}, "a: must map parameters to values, got 3"),
        ("presets", {"a": {"temprature": 1}}, "a: unknown 'temprature'; choose from temperature, "),
        ("presets", {"a": {"temperature": -1}}, "a: temperature: must be a number"),
        ("presets", {"a": {"system": 3}}, "a: system_prompt: must be a text"),
        ("presets", "{", "must be a mapping, or JSON of one"),
        ("presets", __file__, "must end in .yaml, .yml or .toml"),
        ("presets", "missing.yaml", "cannot read 'missing.yaml'"),
        ("override_generation_config", "top_p", "must be JSON or NAME=VALUE,NAME=VALUE, got 'top_p'"),
        ("override_generation_config", "top_p=2", "top_p: must be a number"),
        ("override_generation_config", {"system": "x"}, "has a system prompt, which is the option system_prompt"),
        ("chat_template", "missing.jinja", "cannot read 'missing.jinja'"),
        ("system_prompt", 3, "must be a text"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_loaded(option: str, value: Any, problem: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        EngineConfig(**{option: value})
    assert str(raised.value).startswith(f"{option}: ")
    assert problem in str(raised.value)


def test_each_way_to_write_presets_and_overrides(tmp_path: Path) -> None:
    files = {"p.yaml": json.dumps(PRESETS), "p.toml": '[precise]\ntemperature = 0\nsystem = "Be brief."\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        presets = parse_presets("presets", str(tmp_path / name))
        assert presets["precise"] == RequestDefaults({"temperature": 0}, "Be brief.")
    assert parse_presets("presets", json.dumps(PRESETS)).keys() == PRESETS.keys()
    for text in ('{"temperature": 0.5, "max_new_tokens": 9}', "temperature=0.5, max_tokens=9"):
        assert parse_overrides("override", text) == {"temperature": 0.5, "max_tokens": 9}


def test_a_template_without_a_role_for_it_gets_the_system_prompt_in_the_first_question() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    for template, first in (
        (CHATML, "<|im_start|>system\nSing.<|im_end|>"),
        (refusing, "<|im_start|>user\nSing.\n\nhello"),
    ):
        tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=template)
        prompt = ChatFormat(tokenizer, None, RequestDefaults(system_prompt="Sing.")).prompt(QUESTION)
        assert prompt["prompt"].startswith(first)


def test_a_chat_template_of_the_user_holds_in_python_and_the_server(model: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("Q: {{ messages[-1].content }} A:")
    with LLM(model, progress=False, kv_memory="2MiB", chat_template=file) as llm:
        assert llm.chat(QUESTION, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt == "Q: hello A:"
    served = load_served_model(ServerConfig(model, engine={"chat_template": str(file)}))
    assert served.tokenizer.chat_template == file.read_text()


# ---- how outputs end ----------------------------------------------------------------------------------------------


def test_stop_strings_and_end_tokens_of_the_model_end_every_output(model: str, tmp_path: Path) -> None:
    plain = SamplingParams(temperature=0, max_tokens=24)
    with LLM(model, progress=False, kv_memory="2MiB") as llm:
        (free,) = llm.generate(TEXT, plain.clone(ignore_eos=True), use_tqdm=False)[0].outputs
    end, token = free.text[6:9], free.token_ids[4]
    (tmp_path / "strings.json").write_text(json.dumps({"stop_strings": [end]}))
    (tmp_path / "tokens.json").write_text(json.dumps({"eos_token_id": [token]}))
    with LLM(model, progress=False, kv_memory="2MiB", generation_config=str(tmp_path / "strings.json")) as llm:
        (cut,) = llm.generate(TEXT, plain, use_tqdm=False)[0].outputs
        (ignoring,) = llm.generate(TEXT, plain.clone(ignore_eos=True), use_tqdm=False)[0].outputs
        (both,) = llm.generate(TEXT, plain.clone(stop=free.text[2:4]), use_tqdm=False)[0].outputs
        assert len(llm.beam_search(TEXT, 2, max_tokens=4, use_tqdm=False)[0].outputs) == 2
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free.text[: free.text.index(end)], "stop", None)
    assert ignoring.text == free.text
    assert (both.finish_reason, both.stop_reason) == ("stop", free.text[2:4])
    with LLM(model, progress=False, kv_memory="2MiB", generation_config=str(tmp_path / "tokens.json")) as llm:
        (ended,) = llm.generate(TEXT, plain, use_tqdm=False)[0].outputs
    assert ended.token_ids == free.token_ids[: free.token_ids.index(token) + 1]


@pytest.mark.parametrize("content", [{"stop_strings": 3}, {"stop_strings": [""]}, {"eos_token_id": "x"}])
def test_wrong_ends_in_a_file_are_refused(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(content))
    with pytest.raises(InvalidParameter, match=r"generation_config: .*own\.json: stop"):
        EngineConfig(generation_config=str(tmp_path / "own.json"))
