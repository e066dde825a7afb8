"""Ollama's API: shapes of requests and responses as its clients have them, over real sockets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from chairlift.core.request import RequestLimits
from chairlift.core.sampling.params import SamplingParams
from chairlift.loading.request_defaults import RequestDefaults
from chairlift.server.ollama.types import OllamaMessage, chat_messages
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import Loaded, Submit, ToEngine, Update
from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import FrontEnd, ScriptedEngine, front_end, stay_silent
from tests.server.running_server import HTTP, NAME, RunningServer, wait_for
from tests.server.sample_tools import MESSAGES, THINKING_TEMPLATE, WEATHER
from tests.tiny import byte_level_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
IGNORED = "x-chairlift-ignored-fields"
FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}
ENDING = {"model", "created_at", "done", "done_reason", *FIGURES}
CHAT = {"model": NAME, "messages": HELLO, "options": {"num_predict": 4, "temperature": 0}}
GENERATE = {"model": NAME, "prompt": "hello", "options": {"num_predict": 4, "temperature": 0}}


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = answer.text.splitlines()
    assert all(line.endswith('"done":false}') for line in lines[:-1]), "proxies know the end by this"
    return [json.loads(line) for line in lines]


def post(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def error(server: RunningServer, path: str, body: dict[str, Any], status: int = 400) -> str:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    return str(answer.json()["error"])


def test_a_chat_is_streamed_by_default_as_lines_of_json(server: RunningServer) -> None:
    *parts, last = chunks(server.post("/api/chat", CHAT))
    whole = post(server, "/api/chat", CHAT | {"stream": False})
    assert parts
    for part in parts:
        assert part.keys() == {"model", "created_at", "message", "done"}
        assert (part["done"], part["message"]["role"]) == (False, "assistant")
    assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"] != ""
    assert last.keys() == whole.keys() == ENDING | {"message"}
    assert last["message"] == {"role": "assistant", "content": ""}
    for end in (last, whole):
        assert (end["done"], end["done_reason"], end["eval_count"], end["model"]) == (True, "length", 4, NAME)
        assert all(type(end[name]) is int and end[name] > 0 for name in FIGURES)
        assert end["total_duration"] >= end["prompt_eval_duration"] + end["eval_duration"]


def test_a_chat_is_that_of_the_other_apis(server: RunningServer) -> None:
    openai = post(server, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 9, "temperature": 0})
    options = {"num_predict": 9, "temperature": 0}
    ours = post(server, "/api/chat", {"messages": HELLO, "stream": False, "options": options})
    assert ours["message"]["content"] == openai["choices"][0]["message"]["content"]
    assert ours["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    generated = post(server, "/api/generate", GENERATE | {"stream": False, "options": options})
    assert generated["response"] == ours["message"]["content"]


def test_a_prompt_is_written_by_the_template_unless_it_is_raw(server: RunningServer) -> None:
    *parts, last = chunks(server.post("/api/generate", GENERATE))
    assert "".join(part["response"] for part in parts) != ""
    assert last.keys() == ENDING | {"response", "context"}
    raw = post(server, "/api/generate", GENERATE | {"raw": True, "stream": False})
    text = post(server, "/v1/completions", {"prompt": "hello", "max_tokens": 4, "temperature": 0})
    assert raw["response"] == text["choices"][0]["text"]
    assert raw["prompt_eval_count"] < last["prompt_eval_count"]
    assert "context" not in raw
    with_system = post(server, "/api/generate", GENERATE | {"system": "Be brief.", "stream": False})
    assert with_system["prompt_eval_count"] > last["prompt_eval_count"]


def test_a_context_comes_before_the_next_prompt(server: RunningServer) -> None:
    first = post(server, "/api/generate", GENERATE | {"stream": False})
    assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
    second = post(server, "/api/generate", GENERATE | {"stream": False, "context": first["context"]})
    assert second["prompt_eval_count"] == len(first["context"]) + first["prompt_eval_count"]
    assert second["context"][: len(first["context"])] == first["context"]


@pytest.mark.parametrize("name", [NAME, f"{NAME}:latest", None])
def test_models_have_tags(server: RunningServer, name: str | None) -> None:
    assert post(server, "/api/chat", CHAT | {"model": name, "stream": False})["model"] == (name or NAME)
    assert post(server, "/v1/chat/completions", {"model": name, "messages": HELLO, "max_tokens": 1})


@pytest.mark.parametrize(
    ("path", "body"),
    [("/api/chat", {"messages": []}), ("/api/chat", {}), ("/api/generate", {}), ("/api/generate", {"prompt": ""})],
)
def test_a_request_without_a_prompt_loads_the_model(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, {"model": NAME, "keep_alive": -1, **body})
    assert answer.headers[IGNORED] == "keep_alive"
    assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")
    assert "not exist" in error(server, path, {"model": "other", **body}, 404)


# ---- parameters ------------------------------------------------------------------------------------------------------


def params_of(path: str, **body: Any) -> SamplingParams:
    """The sampling parameters that the engine gets."""
    with front_end(sampling={"temperature": 0.5, "top_p": 0.7}) as served:
        answer = httpx.post(served.url + path, json={"stream": False, **body})
        assert answer.status_code == 200, answer.text
        (submitted,) = (message for message in served.engine.received if isinstance(message, Submit))
        return submitted.params


def test_options_are_sampling_parameters() -> None:
    options = {"temperature": 0.1, "top_k": 3.0, "top_p": 0.4, "min_p": 0.1, "seed": 7, "num_predict": 5}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["x", "y"]}
    off = {"typical_p": 1.0, "mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1}
    for path, body in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "a"})):
        params = params_of(path, **body, options=options | off)
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.1, 3, 0.4, 0.1)
        assert (params.seed, params.max_tokens, params.stop) == (7, 5, ("x", "y"))
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.5, 0.25)
        params = params_of(path, **body, options={"num_predict": -1, "repeat_penalty": 1.5, "repeat_last_n": 0})
        assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.7, None)  # the model's
        assert params.repetition_penalty == 1.0


def test_an_output_limit_that_is_too_large_fills_the_context() -> None:
    params = params_of("/api/chat", messages=HELLO, options={"num_predict": 100_000})
    assert params.max_tokens is not None
    assert 100 < params.max_tokens < 256


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"num_predict": 1.5}}, "options.num_predict"),
        ({"options": {"temprature": 1}}, "options.temprature"),
        ({"options": {"top_p": 2}}, "options.top_p"),
        ({"options": {"stop": [1]}}, "options.stop[0]"),
        ({"format": "yaml"}, "format"),
        ({"format": {"type": "objekt"}}, "format"),
        ({"think": "hard"}, "think"),
        ({"top_logprobs": 50}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_wrong_values_are_named(server: RunningServer, fields: dict[str, Any], named: str) -> None:
    for path, body in (("/api/chat", CHAT), ("/api/generate", GENERATE)):
        assert error(server, path, {**body, **fields}).startswith(f"{named}:")
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"content": "a"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a" * 9000}]}, "messages"),
        ("/api/generate", {"images": ["aGk="]}, "images"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"suffix": "b"}, "suffix"),
        ("/api/generate", {"raw": True, "system": "b"}, "system"),
        ("/api/generate", {"context": [-1]}, "context"),
        ("/api/generate", {"prompt": "a" * 9000}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused(server: RunningServer, path: str, fields: dict[str, Any], named: str) -> None:
    body = CHAT if path == "/api/chat" else GENERATE
    assert error(server, path, {**body, **fields}).startswith(f"{named}:")


def test_options_about_loading_are_named_as_ignored(server: RunningServer) -> None:
    fields = {"keep_alive": "5m", "think": True, "colour": "red"}
    options = CHAT["options"] | {"num_ctx": 2048, "num_gpu": 1}  # type: ignore[operator]
    answer = server.post("/api/chat", CHAT | fields | {"options": options})
    names = set(answer.headers[IGNORED].split(", "))
    assert names == {"keep_alive", "options.num_ctx", "options.num_gpu", "think", "colour"}


@pytest.mark.parametrize("type_", ["application/x-www-form-urlencoded", "text/plain", None])
def test_bodies_are_json_whatever_they_say(server: RunningServer, type_: str | None) -> None:
    headers = {} if type_ is None else {"Content-Type": type_}
    answer = HTTP.post(f"{server.url}/api/generate", content=json.dumps(GENERATE), headers=headers)
    assert chunks(answer)[-1]["done_reason"] == "length"
    headers |= {"Origin": "http://evil.example"}
    answer = HTTP.post(f"{server.url}/api/generate", content=json.dumps(GENERATE), headers=headers)
    assert (answer.status_code, answer.json().keys()) == (403, {"error"})


# ---- output ----------------------------------------------------------------------------------------------------------


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("format_", ["json", SCHEMA])
def test_the_output_has_the_format(server: RunningServer, format_: Any) -> None:
    options = {"num_predict": 60, "temperature": 0}
    answer = post(server, "/api/chat", CHAT | {"format": format_, "stream": False, "options": options})
    text = answer["message"]["content"]
    assert text.lstrip().startswith("{")
    if format_ != "json":
        assert json.loads(text)["a"] in (1, 2)
        assert answer["done_reason"] == "stop"


def test_logprobs_are_those_of_the_tokens(server: RunningServer) -> None:
    *parts, last = chunks(server.post("/api/chat", CHAT | {"logprobs": True, "top_logprobs": 2}))
    found = [one for part in parts for one in part.get("logprobs", ())]
    assert len(found) == 4
    assert all(one.keys() == {"token", "logprob", "bytes", "top_logprobs"} for one in found)
    assert all(len(one["top_logprobs"]) == 2 for one in found)
    whole = post(server, "/api/generate", GENERATE | {"logprobs": True, "stream": False})
    assert [one["token"] for one in whole["logprobs"]] == [one["token"] for one in found]
    assert "logprobs" not in last


def call_output(engine: ScriptedEngine, message: ToEngine) -> None:
    """Answers with reasoning, text and two calls, in pieces."""
    if isinstance(message, Submit):
        text = 'Hm</think>Well.<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
        text += '</tool_call><tool_call>{"name": "get_weather", "arguments": {"city": "Be'
        for at in range(0, len(text), 7):
            engine.publish(Update(message.request_id, text=text[at : at + 7], tokens=[5], cached_tokens=0))
        engine.publish(Update(message.request_id, finish_reason="length"))


def test_reasoning_and_calls_have_their_own_fields() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=THINKING_TEMPLATE)
    body = {"messages": MESSAGES, "tools": [WEATHER], "think": True}
    with front_end(
        call_output,
        tokenizer=tokenizer,
        loaded=Loaded(RequestLimits(vocab_size=320, max_model_len=4096), max_batch_requests=8),
    ) as served:
        parts = chunks(httpx.post(f"{served.url}/api/chat", json=body))
        whole = httpx.post(f"{served.url}/api/chat", json=body | {"stream": False}).json()
    messages = [part["message"] for part in parts]
    assert "".join(one.get("thinking", "") for one in messages) == whole["message"]["thinking"] == "Hm"
    assert "".join(one["content"] for one in messages) == whole["message"]["content"] == "Well."
    calls = [call for one in messages for call in one.get("tool_calls", ())]
    assert [call["function"] for call in calls] == [call["function"] for call in whole["message"]["tool_calls"]]
    first, second = (call["function"] for call in calls)
    assert first == {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
    assert second["arguments"].keys() == {"_invalid_json"}  # it was cut
    assert (whole["done_reason"], parts[-1]["done_reason"]) == ("length", "length")


def test_a_text_that_is_cut_keeps_the_token_at_its_end() -> None:
    backend = byte_level_tokenizer()
    end = backend.token_to_id("<|endoftext|>")
    special = [("<|endoftext|>", end)]
    backend.post_processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=special)
    with front_end(stay_silent, tokenizer=Tokenizer(backend)) as served:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/api/embed", json={"input": "xyz " * 400}, timeout=1)
        (submitted,) = (message for message in served.engine.received if isinstance(message, Submit))
    assert (len(submitted.prompt), submitted.prompt[-1]) == (256, end)
    assert end not in submitted.prompt[:-1]


def test_think_false_turns_the_reasoning_off(thinking_server: RunningServer) -> None:
    lengths = {
        think: post(thinking_server, "/api/chat", CHAT | {"think": think, "stream": False})["prompt_eval_count"]
        for think in (True, False, "high")
    }
    assert lengths[False] > lengths[True] == lengths["high"]


def test_calls_and_their_results_are_sent_back(tool_server: RunningServer) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 1}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "Rain"},
    ]
    short = post(tool_server, "/api/chat", CHAT | {"messages": MESSAGES, "tools": [WEATHER], "stream": False})
    answer = tool_server.post("/api/chat", CHAT | {"messages": history, "tools": [WEATHER], "stream": False})
    assert answer.status_code == 200, answer.text
    assert IGNORED not in answer.headers
    assert answer.json()["prompt_eval_count"] > short["prompt_eval_count"] + len("Oslo")


# ---- embeddings ------------------------------------------------------------------------------------------------------


def test_embeddings(server: RunningServer) -> None:
    openai = post(server, "/v1/embeddings", {"input": ["hello", "you"]})["data"]
    answer = post(server, "/api/embed", {"model": NAME, "input": ["hello", "you"]})
    assert answer["embeddings"] == [one["embedding"] for one in openai]
    assert answer["prompt_eval_count"] > 0
    assert len(post(server, "/api/embed", {"input": "hello", "dimensions": 3})["embeddings"][0]) == 3
    old = post(server, "/api/embeddings", {"model": NAME, "prompt": "hello"})
    assert old.keys() == {"embedding"}
    scale = old["embedding"][0] / openai[0]["embedding"][0]  # It is not normalised.
    assert old["embedding"] == pytest.approx([scale * value for value in openai[0]["embedding"]], rel=1e-4)
    assert post(server, "/api/embed", {"input": []})["embeddings"] == []
    assert post(server, "/api/embeddings", {"prompt": ""}) == {"embedding": []}


def test_a_text_that_is_too_long_is_cut_unless_it_must_not_be(server: RunningServer) -> None:
    body = {"input": "hello " * 500}
    assert post(server, "/api/embed", body)["prompt_eval_count"] == 256
    assert error(server, "/api/embed", body | {"truncate": False}).startswith("input:")
    assert error(server, "/api/embed", {"input": ["a", ""]}).startswith("input:")
    assert error(server, "/api/embed", {"input": 3}).startswith("input:")


# ---- models ----------------------------------------------------------------------------------------------------------


def test_results_go_to_the_calls_that_they_name() -> None:
    calls = [{"id": f"id{name}", "function": {"name": name, "arguments": {}}} for name in "abc"]
    results = [{"tool_call_id": "idc"}, {"tool_name": "b"}, {}, {"tool_call_id": "other"}]
    given = [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", "content": "x"} | one for one in results)]
    messages = chat_messages([OllamaMessage.model_validate(one) for one in given])[1:]
    assert [one["tool_call_id"] for one in messages] == ["idc", "idb", "ida", "other"]
    assert [one.get("name") for one in messages] == ["c", "b", "a", None]


def test_the_model_is_listed_and_described(tool_server: RunningServer) -> None:
    (listed,) = tool_server.get("/api/tags").json()["models"]
    (running,) = tool_server.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == running["model"] == f"{NAME}:latest"
    assert listed["size"] > 0
    assert len(listed["digest"]) == 64
    assert listed["details"].keys() >= {"format", "family", "families", "parameter_size", "quantization_level"}
    assert (listed["details"]["format"], listed["details"]["family"]) == ("safetensors", "llama")
    assert (running["context_length"], running["size_vram"]) == (2048, 0)
    shown = post(tool_server, "/api/show", {"model": listed["model"]})
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["llama.context_length"] == 2048
    assert shown["model_info"]["general.architecture"] == "llama"
    assert post(tool_server, "/api/show", {"name": NAME}) == shown
    assert "not exist" in error(tool_server, "/api/show", {"model": "other"}, 404)


def test_capabilities_are_those_of_the_model(server: RunningServer, thinking_server: RunningServer) -> None:
    assert post(server, "/api/show", {"model": NAME})["capabilities"] == ["completion"]
    assert post(thinking_server, "/api/show", {"model": NAME})["capabilities"] == ["completion", "tools", "thinking"]


def test_only_the_served_model_is_pulled_and_none_is_changed(server: RunningServer) -> None:
    assert chunks(server.post("/api/pull", {"model": NAME})) == [{"status": "success"}]
    assert post(server, "/api/pull", {"name": NAME, "stream": False}) == {"status": "success"}
    assert "not exist" in error(server, "/api/pull", {"model": "llama3"}, 404)
    for name in ("create", "copy", "push", "blobs/sha256:00"):
        assert "one model" in error(server, f"/api/{name}", {"model": NAME})
    answer = HTTP.request("DELETE", f"{server.url}/api/delete", json={"model": NAME})
    assert (answer.status_code, answer.json().keys()) == (400, {"error"})
    assert "/api/nothing" in server.get("/api/nothing").json()["error"]


# ---- guards ----------------------------------------------------------------------------------------------------------

PATHS = [("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "a"}), ("/api/embed", {"input": "a"})]


@pytest.fixture(scope="module")
def guarded() -> Any:
    with front_end(api_keys=["secret-of-the-test"]) as served:
        yield served


@pytest.mark.parametrize(("path", "body"), [*PATHS, ("/api/show", {}), ("/api/pull", {})])
def test_keys_are_needed(guarded: FrontEnd, path: str, body: dict[str, Any]) -> None:
    for url in (guarded.url + path, f"{guarded.url}/{path}"):
        answer = httpx.post(url, json=body)
        assert (answer.status_code, answer.json().keys()) == (401, {"error"})
    assert httpx.get(f"{guarded.url}/api/tags").status_code == 401


@pytest.mark.parametrize(("path", "body"), PATHS[:2])
def test_a_client_that_leaves_ends_its_request(path: str, body: dict[str, Any]) -> None:
    with front_end(stay_silent) as served:
        served.post_and_disconnect(path, body)
        wait_for(lambda: served.engine.num_open == 0, "the request to be cancelled")


def test_a_stream_that_waits_sends_empty_chunks_and_ends_with_an_error() -> None:
    lines: list[dict[str, Any]] = []
    with (
        front_end(stay_silent, limits=Limits(ping_seconds=0.05)) as served,
        httpx.stream("POST", f"{served.url}/api/chat", json={"messages": HELLO}, timeout=60) as answer,
    ):
        for line in answer.iter_lines():
            lines.append(json.loads(line))
            if len(lines) == 3:
                (submitted,) = (one for one in served.engine.received if isinstance(one, Submit))
                served.engine.publish(Update(submitted.request_id, finish_reason="deadline"))
        wait_for(lambda: served.engine.num_open == 0, "the request to end")
    assert all(line["message"] == {"role": "assistant", "content": ""} for line in lines[:-1])
    assert lines[-1].keys() == {"error"}


# ---- requests as other clients send them -----------------------------------------------------------------------------


def test_copilots_requests(tool_server: RunningServer) -> None:
    """What VS Code's Ollama provider asks before a chat (OllamaLMProvider of microsoft/vscode-copilot-chat)."""
    version = [int(part) for part in tool_server.get("/api/version").json()["version"].split(".")]
    assert version >= [0, 6, 4]
    for model in tool_server.get("/api/tags").json()["models"]:
        shown = post(tool_server, "/api/show", {"model": model["model"]})
        context = shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"]
        assert context == 2048
        assert shown["model_info"]["general.basename"]
        assert ("tools" in shown["capabilities"], "vision" in shown["capabilities"]) == (True, False)
        body = {"model": model["model"], "messages": MESSAGES, "stream": True, "max_tokens": 4, "temperature": 0.1}
        body |= {"tools": [WEATHER], "stream_options": {"include_usage": True}, "top_p": 1, "n": 1}
        assert tool_server.post("/v1/chat/completions", body).text.endswith("data: [DONE]\n\n")


def test_open_webuis_requests(server: RunningServer) -> None:
    """The bodies that its backend sends to the server (routers/ollama.py of open-webui/open-webui)."""
    assert server.get("/api/version").json()["version"]
    (model,) = (one["model"] for one in server.get("/api/tags").json()["models"])
    assert server.get("/api/ps").json()["models"][0]["model"] == model
    body = {"model": model, "messages": [{"role": "user", "content": "hello", "images": []}], "stream": True}
    body |= {"options": {"num_predict": 3, "num_ctx": 2048, "temperature": 0.8, "stop": []}, "keep_alive": "5m"}
    assert chunks(server.post("/api/chat", body))[-1]["done"]
    title = {"model": model, "prompt": "Write a title", "stream": False, "options": {"num_predict": 3}}
    assert post(server, "/api/generate", title)["response"]
    unload = {"model": model, "keep_alive": 0, "prompt": ""}
    assert post(server, "/api/generate", unload)["done"]


def test_presets_are_models_with_defaults_of_their_own() -> None:
    brief = RequestDefaults({"temperature": 0.25, "stop": ["a", "b"], "max_tokens": 7}, "Be brief.")
    defaults = RequestDefaults({"temperature": 0.5}, presets={"brief": brief})
    with front_end(defaults=defaults) as served:
        names = [one["model"] for one in httpx.get(f"{served.url}/api/tags").json()["models"]]
        assert names == ["scripted:latest", "scripted:brief"]
        shown = httpx.post(f"{served.url}/api/show", json={"model": names[1]}).json()
        assert shown["parameters"].splitlines() == ["temperature 0.25", 'stop "a"', 'stop "b"', "num_predict 7"]
        assert shown["system"] == "Be brief."
        for path, body in (("/api/chat", {"messages": HELLO}), ("/completion", {"prompt": "a"})):
            for name in names:
                assert httpx.post(served.url + path, json={"model": name, **body}).status_code == 200
        limits = [one.params.max_tokens for one in served.engine.received if isinstance(one, Submit)]
        temperatures = [one.params.temperature for one in served.engine.received if isinstance(one, Submit)]
    assert (limits, temperatures) == ([None, 7, None, 7], [0.5, 0.25, 0.5, 0.25])
