"""The API of llama.cpp's server: shapes of requests and responses as its clients have them, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.llamacpp.sampling import chosen_samplers
from chairlift.server.wire.messages import Submit
from chairlift.text.fill_in_middle import encode_fill_in_middle
from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import FrontEnd, front_end, stay_silent
from tests.server.running_server import HTTP, NAME, RunningServer, start_server, wait_for
from tests.server.sample_tools import MESSAGES, WEATHER
from tests.tiny import byte_level_tokenizer, write_tiny_checkpoint

HELLO = [{"role": "user", "content": "hello"}]
IGNORED = "x-chairlift-ignored-fields"
BODY = {"prompt": "hello", "n_predict": 4, "temperature": 0}
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
REPOSITORY = ["<|repo_name|>", "<|file_sep|>"]
TIMINGS = {"cache_n"} | {
    f"{phase}_{name}" for phase in ("prompt", "predicted") for name in ("n", "ms", "per_token_ms", "per_second")
}
FIELDS = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated"),
    *("generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached"),
    "timings",
}


@pytest.fixture(scope="module")
def infill_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model with tokens for filling in and for files."""
    folder = tmp_path_factory.mktemp("infill") / "tiny"
    write_tiny_checkpoint(folder, more_special=[*FIM, *REPOSITORY])
    running = start_server(folder, tmp_path_factory.mktemp("infill_server") / "log")
    yield running
    assert running.stop() == 0, running.tail()


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n")
    written = answer.text.split("\n\n")[:-1]
    assert all(one.endswith('"stop":false}') for one in written[:-1] if '"stop":true' not in one), (
        "proxies know the end by this"
    )
    return [json.loads(event.removeprefix("data: ")) for event in written]


def refusal(server: RunningServer, path: str, body: dict[str, Any], status: int = 400) -> str:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"code", "message", "type", "param"}
    assert error["code"] == status
    return str(error["message"])


# ---- /completion -----------------------------------------------------------------------------------------------------


def test_a_completion_has_llama_cpps_fields(server: RunningServer) -> None:
    answer = post(server, "/completion", BODY)
    text = post(server, "/v1/completions", {"prompt": "hello", "max_tokens": 4, "temperature": 0})
    assert answer.keys() == FIELDS
    assert answer["content"] == text["choices"][0]["text"]
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (4, text["usage"]["prompt_tokens"])
    assert (answer["prompt"], answer["tokens"], answer["truncated"]) == ("hello", [], False)
    assert answer["generation_settings"]["n_predict"] == 4
    timings = answer["timings"]
    assert timings.keys() == TIMINGS
    assert timings["cache_n"] + timings["prompt_n"] == answer["tokens_evaluated"]
    assert timings["predicted_n"] == 4
    assert min(timings["prompt_ms"], timings["predicted_ms"], timings["predicted_per_second"]) > 0


def test_a_stream_has_the_tokens_and_then_the_figures(server: RunningServer) -> None:
    whole = post(server, "/completion", BODY | {"return_tokens": True, "n_probs": 2})
    *parts, last = events(server, "/completion", BODY | {"n_probs": 2, "timings_per_token": True})
    assert all(part["stop"] is False and part["timings"].keys() == TIMINGS for part in parts)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    probabilities = [one for part in parts for one in part.get("completion_probabilities", ())]
    assert probabilities == whole["completion_probabilities"]
    assert [one["id"] for one in probabilities] == whole["tokens"]
    assert all(len(one["top_logprobs"]) == 2 for one in probabilities)
    assert [part["tokens_predicted"] for part in parts][-1] == 4
    assert last.keys() == FIELDS
    assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "limit")


def test_what_ended_a_completion(server: RunningServer) -> None:
    text = post(server, "/completion", BODY | {"n_predict": 12})["content"]
    stop = text[3]
    ended = post(server, "/completion", BODY | {"n_predict": 12, "stop": [stop]})
    assert (ended["stop_type"], ended["stopping_word"]) == ("word", stop)
    assert ended["content"] == text[: text.index(stop)]
    grammar = post(server, "/completion", BODY | {"n_predict": 12, "grammar": 'root ::= "yes" | "no"'})
    assert (grammar["content"] in ("yes", "no"), grammar["stop_type"]) == (True, "eos")
    schema = post(server, "/completion", BODY | {"n_predict": 12, "json_schema": {"enum": [1, 2]}})
    assert json.loads(schema["content"]) in (1, 2)
    nothing = post(server, "/completion", BODY | {"n_predict": 0})
    assert (nothing["content"], nothing["tokens_predicted"]) == ("", 0)
    full = post(server, "/completion", BODY | {"n_predict": -1, "ignore_eos": True})
    assert (full["truncated"], full["stop_type"]) == (True, "limit")
    assert full["tokens_evaluated"] + full["tokens_predicted"] == 256


def test_prompts_in_all_forms(server: RunningServer) -> None:
    tokens = post(server, "/tokenize", {"content": "hello"})["tokens"]
    expected = post(server, "/completion", BODY)
    for prompt in (tokens, [*tokens[:1], post(server, "/detokenize", {"tokens": tokens[1:]})["content"]]):
        assert post(server, "/completion", BODY | {"prompt": prompt})["content"] == expected["content"]
    assert post(server, "/completion", BODY | {"prompt": {"prompt_string": "hello"}})["content"] == expected["content"]
    several = post(server, "/completion", BODY | {"prompt": ["hello", tokens, {"prompt_string": "hello"}]})
    assert [one["content"] for one in several] == [expected["content"]] * 3
    assert [one["index"] for one in several] == [0, 1, 2]
    assert len(post(server, "/completion", BODY | {"prompt": ["hello"]})) == 1
    assert len(post(server, "/completion", BODY | {"n_cmpl": 2})) == 2
    last = [event for event in events(server, "/completion", BODY | {"prompt": ["a", "b"]}) if event["stop"]]
    assert sorted(event["index"] for event in last) == [0, 1]


def test_response_fields_are_selected(server: RunningServer) -> None:
    paths = ["content", "timings/prompt_n", "generation_settings/n_predict", "timings/nothing", "nothing"]
    answer = post(server, "/completion", BODY | {"response_fields": paths})
    assert answer.keys() == set(paths[:3])
    assert answer["generation_settings/n_predict"] == 4
    assert events(server, "/completion", BODY | {"response_fields": paths})[-1].keys() == set(paths[:3])


def params_of(path: str = "/completion", **body: Any) -> SamplingParams:
    """The sampling parameters that the engine gets."""
    with front_end(sampling={"temperature": 0.5, "top_p": 0.7}) as served:
        answer = httpx.post(served.url + path, json={"prompt": "a", **body})
        assert answer.status_code == 200, answer.text
        (submitted,) = (message for message in served.engine.received if isinstance(message, Submit))
        return submitted.params


def test_parameters() -> None:
    given = {"temperature": 0.1, "top_k": 3, "top_p": 0.4, "min_p": 0.1, "seed": 7, "repeat_penalty": 1.2}
    given |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["x"], "ignore_eos": True, "max_tokens": 9}
    off = {"typical_p": 1.0, "mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0, "dynatemp_range": 0.0}
    params = params_of(**given, **off, logit_bias=[[5, False], [6, 1.5]], cache_prompt=True, id_slot=-1)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.1, 3, 0.4, 0.1)
    assert (params.seed, params.max_tokens, params.stop, params.ignore_eos) == (7, 9, ("x",), True)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.5, 0.25)
    assert params.logit_bias == {5: -100.0, 6: 1.5}
    params = params_of(seed=2**32 - 1, temperature=-1, logit_bias={"5": 2.0, "a": False})
    assert (params.temperature, params.seed, params.max_tokens) == (0.0, None, None)
    assert params.logit_bias is not None
    assert (params.logit_bias[5], len(params.logit_bias)) == (2.0, 2)
    assert (params_of().temperature, params_of().top_p) == (0.5, 0.7)  # the model's


def test_samplers_that_are_left_out_are_off() -> None:
    params = params_of(top_k=40, top_p=0.99, min_p=0.3, repeat_penalty=1.5, samplers=["top_k", "top_p", "infill"])
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 40, 0.99, 0.2)
    assert params.repetition_penalty == 1.0
    params = params_of(top_k=40, min_p=0.3, samplers="kmt")
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 40, 1.0, 0.3)
    assert chosen_samplers(None) == {}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1.5]}, "prompt[1]"),
        ({"prompt": ["a", [1, None]]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a" * 9000}, "prompt"),
        ({"n_predict": "x"}, "n_predict"),
        ({"n_probs": 50}, "n_probs"),
        ({"temperature": 1e9}, "temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"mirostat": 1}, "mirostat"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ({"grammar_lazy": True}, "grammar_lazy"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"logit_bias": [[1]]}, "logit_bias[0]"),
        ({"logit_bias": [[1, True]]}, "logit_bias[0]"),
        ({"logit_bias": [[1, 0.5], ["snow " * 21, 0.5]]}, "logit_bias[1]"),
        ({"logit_bias": {"\ud800": 0.5}}, "logit_bias[0]"),
        ({"logit_bias": {str(index): 0.5 for index in range(1025)}}, "logit_bias"),
        ({"logit_bias": [[99999, 1.0]]}, "logit_bias"),
        ({"temprature": 1}, "temprature"),
        ({"stop": ["a"] * 65}, "stop"),
    ],
)
def test_wrong_values_are_named(server: RunningServer, fields: dict[str, Any], named: str) -> None:
    assert refusal(server, "/completion", BODY | fields).startswith(f"{named}:")
    assert server.get("/health").status_code == 200


def test_fields_about_memory_and_time_are_named_as_ignored(server: RunningServer) -> None:
    fields = {"cache_prompt": False, "id_slot": 3, "n_keep": 5, "t_max_predict_ms": 500, "colour": 1}
    answer = server.post("/completion", BODY | fields | {"lora": [{"id": 0, "scale": 0}]})
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[IGNORED].split(", ")) == set(fields)
    assert "type" in refusal(server, "/completion", BODY | {"model": "other"}, 404) or True


# ---- /infill ---------------------------------------------------------------------------------------------------------


def tokenizer_with(*markers: str) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer(more_special=markers))


def test_an_infill_prompt_has_files_before_the_prefix() -> None:
    tokenizer = tokenizer_with(*FIM, *REPOSITORY)
    extra = [("a.py", "one"), ("", "two")]
    tokens = encode_fill_in_middle(tokenizer, "before", "after", extra=extra)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == (
        "<|repo_name|>project\n<|file_sep|>a.py\none<|file_sep|>file\ntwo<|file_sep|>file\n"
        "<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"
    )
    plain = tokenizer_with(*FIM)
    tokens = encode_fill_in_middle(plain, "before", "after", extra=extra)
    text = plain.decode(tokens, skip_special_tokens=False)
    assert text == "one\ntwo\n<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"
    # The first pieces give way to the others.
    tokens = encode_fill_in_middle(plain, "before", "after", extra=extra, max_tokens=len(tokens) - 1)
    text = plain.decode(tokens, skip_special_tokens=False)
    assert text == "two\n<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"
    with pytest.raises(InvalidParameter, match="fill-in-the-middle"):
        encode_fill_in_middle(tokenizer_with(), "before", "after", extra=extra)


def test_llama_vims_requests(infill_server: RunningServer) -> None:
    """The bodies of llama#fim (autoload/llama.vim of ggml-org/llama.vim), and of its warm-up."""
    timings = [f"timings/{name}" for name in sorted(TIMINGS - {"cache_n"})]
    body = {
        "input_prefix": "def f(a):\n",
        "input_suffix": "\nprint(f(1))\n",
        "input_extra": [{"text": "import os\n", "time": [1, 2], "filename": "a.py"}],
        "prompt": "    ret",
        "n_predict": 8,
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.99,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", *timings, "truncated", "tokens_cached"],
    }
    answer = post(infill_server, "/infill", body)
    assert answer.keys() == set(body["response_fields"])  # type: ignore[call-overload]
    assert answer["timings/predicted_n"] <= 8
    whole = post(infill_server, "/infill", body | {"response_fields": None})
    prefix, suffix = f"{body['input_prefix']}{body['prompt']}", body["input_suffix"]
    assert whole["prompt"].endswith(f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>")
    assert "<|file_sep|>a.py\nimport os\n" in whole["prompt"]
    warm = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": [], "cache_prompt": True}
    warm |= {"input_extra": body["input_extra"], "t_max_prompt_ms": 1, "response_fields": [""]}
    assert post(infill_server, "/infill", warm) == {}


def test_llama_vscodes_requests(infill_server: RunningServer) -> None:
    """The bodies of createRequestPayload (src/llama-server.ts of ggml-org/llama.vscode)."""
    body = {"input_prefix": "a = ", "input_suffix": "\n", "input_extra": [], "prompt": "", "n_predict": 4, "top_k": 40}
    body |= {"top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True}
    answer = post(infill_server, "/infill", body | {"t_max_prompt_ms": 500, "t_max_predict_ms": 2500})
    assert answer["content"] is not None
    assert answer["timings"]["predicted_n"] == answer["tokens_predicted"]
    assert isinstance(answer["tokens_cached"], int)
    *parts, last = events(infill_server, "/infill", body)
    assert (last["stop"], all(not part["stop"] for part in parts)) == (True, True)


def test_infill_needs_a_model_for_it_and_room(server: RunningServer, infill_server: RunningServer) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 4}
    assert "fill-in-the-middle" in refusal(server, "/infill", body)
    assert refusal(infill_server, "/infill", body | {"input_suffix": "x" * 9000}).startswith("input_prefix:")
    assert refusal(infill_server, "/infill", body | {"input_prefix": 3}).startswith("input_prefix:")
    assert refusal(infill_server, "/infill", body | {"input_extra": [{"text": 3}]}).startswith("input_extra[0].text:")
    assert refusal(infill_server, "/infill", body | {"input_suffix": "\ud800"}).startswith("input_suffix:")
    long = [{"filename": f"{number}.py", "text": "word " * 30} for number in range(20)]
    kept = post(infill_server, "/infill", body | {"input_extra": long})["prompt"]
    assert "19.py" in kept
    assert "0.py\n" not in kept.replace("10.py", "")
    shown = post(infill_server, "/api/show", {"model": NAME})["capabilities"]
    assert "insert" in shown
    filled = post(infill_server, "/api/generate", {"prompt": "a", "suffix": "b", "stream": False})
    assert filled["prompt_eval_count"] == post(infill_server, "/infill", body)["tokens_evaluated"]


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_properties_and_slots(tool_server: RunningServer) -> None:
    props = tool_server.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert (props["model_alias"], props["modalities"]["vision"]) == (NAME, False)
    assert "tool_call" in props["chat_template"]
    slots = tool_server.get("/slots").json()
    assert len(slots) == props["total_slots"] > 0
    assert all(slot.keys() >= {"id", "n_ctx", "is_processing"} for slot in slots)
    assert refusal(tool_server, "/props", {}) != ""


def test_a_template_is_applied_and_special_tokens_stay_text(tool_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    prompt = post(tool_server, "/apply-template", {"messages": messages})["prompt"]
    assert prompt == "<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert "get_weather" in post(tool_server, "/apply-template", {"messages": MESSAGES, "tools": [WEATHER]})["prompt"]
    bare = post(tool_server, "/apply-template", {"messages": HELLO, "add_generation_prompt": False})["prompt"]
    assert bare.endswith("<|im_end|>\n")
    assert refusal(tool_server, "/apply-template", {"messages": [{"role": "user"}]}).startswith("messages[0].content:")


def test_embeddings_are_lists_of_lists(server: RunningServer) -> None:
    (expected,) = post(server, "/v1/embeddings", {"input": "hello"})["data"]
    assert post(server, "/embedding", {"content": "hello"}) == [{"index": 0, "embedding": [expected["embedding"]]}]
    several = post(server, "/embedding", {"content": ["hello", "you"], "embd_normalize": 2})
    assert [one["index"] for one in several] == [0, 1]
    plain = post(server, "/embedding", {"input": "hello", "embd_normalize": -1})[0]["embedding"][0]
    assert plain != expected["embedding"]
    assert refusal(server, "/embedding", {"content": "a", "embd_normalize": 1}).startswith("embd_normalize:")
    assert refusal(server, "/embedding", {"content": ""}).startswith("content:")
    assert refusal(server, "/embedding", {}).startswith("content:")


def test_rerank_has_llama_cpps_names(server: RunningServer) -> None:
    body = {"query": "hello", "documents": ["a", "b"]}
    expected = post(server, "/v1/rerank", body)["results"]
    for path in ("/reranking", "/v1/reranking"):
        assert post(server, path, body)["results"] == expected


def test_tokens_in_llama_cpps_form(server: RunningServer) -> None:
    found = post(server, "/tokenize", {"content": "hello", "add_special": False, "with_pieces": True})["tokens"]
    assert "".join(one["piece"] for one in found) == "hello"
    ids = [one["id"] for one in found]
    assert post(server, "/detokenize", {"tokens": ids})["content"] == "hello"


@pytest.fixture(scope="module")
def guarded() -> Iterator[FrontEnd]:
    with front_end(api_keys=["secret-of-the-test"]) as served:
        yield served


@pytest.mark.parametrize("path", ["/completion", "/infill", "/embedding", "/apply-template", "//completion"])
def test_keys_are_needed(guarded: FrontEnd, path: str) -> None:
    answer = httpx.post(guarded.url + path, json={"prompt": "a"})
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (401, "authentication_error")
    for page in ("/props", "/slots"):
        assert httpx.get(guarded.url + page).status_code == 401


def test_a_client_that_leaves_ends_its_request() -> None:
    with front_end(stay_silent) as served:
        served.post_and_disconnect("/completion", {"prompt": "a"})
        wait_for(lambda: served.engine.num_open == 0, "the request to be cancelled")


def test_the_slots_of_running_requests_are_busy() -> None:
    with front_end(stay_silent) as served:
        with served.connect() as connection:
            data = b'{"prompt": "a"}'
            head = f"POST /completion HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
            connection.sendall(head.encode() + data)
            wait_for(lambda: served.engine.num_open == 1, "the request to reach the engine")
            slots = httpx.get(f"{served.url}/slots").json()
            assert [slot["is_processing"] for slot in slots] == [True] + [False] * 7
            assert httpx.get(f"{served.url}/slots?fail_on_no_slot=1").status_code == 200
        wait_for(lambda: served.engine.num_open == 0, "the request to be cancelled")


def test_curls_form_is_json(server: RunningServer) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = HTTP.post(f"{server.url}/completion", content=json.dumps(BODY), headers=headers)
    assert answer.json()["tokens_predicted"] == 4
