"""Log-probabilities of prompts over HTTP: `echo` with `logprobs`, `prompt_logprobs` and `max_tokens: 0`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.server.openai.chat import TextGeneration
from chairlift.server.openai.types import CompletionRequest
from chairlift.server.served_model import ServedModel
from chairlift.text.tokenizer import Tokenizer
from tests.server.running_server import HTTP, NAME, RunningServer
from tests.tiny import SENTENCES, byte_level_tokenizer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"model": NAME, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def hf(tiny_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def tokens_of(server: RunningServer, prompt: str) -> list[int]:
    tokens: list[int] = server.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    return tokens


def post(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, GREEDY | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected(hf: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


def check_echo(hf: Any, lists: dict[str, Any], tokens: list[int], text: str) -> None:
    """The first lists are those of the prompt."""
    rows = expected(hf, tokens)
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert "".join(lists["tokens"][: len(tokens)]) == text
    for i, token in enumerate(tokens[1:], start=1):
        assert abs(lists["token_logprobs"][i] - float(rows[i - 1, token])) < 1e-3
        assert max(lists["top_logprobs"][i].values()) == pytest.approx(float(rows[i - 1].max()), abs=1e-3)
        assert text[lists["text_offset"][i] :].startswith(lists["tokens"][i])


def test_echo_with_logprobs_begins_with_those_of_the_prompt(server: RunningServer, hf: Any) -> None:
    prompts = [SENTENCES[0], SENTENCES[2]]
    answer = post(server, TEXT, {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2})
    plain = post(server, TEXT, {"prompt": prompts, "logprobs": 2, "max_tokens": 3, "n": 2})
    for choice, alone in zip(answer["choices"], plain["choices"], strict=True):
        prompt = prompts[choice["index"] // 2]
        tokens, lists = tokens_of(server, prompt), choice["logprobs"]
        assert choice["text"] == prompt + alone["text"]
        assert {len(values) for values in lists.values()} == {len(tokens) + 3}
        check_echo(hf, lists, tokens, prompt)
        assert lists["token_logprobs"][len(tokens) :] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-3)
        offsets = [len(prompt) + offset for offset in alone["logprobs"]["text_offset"]]
        assert lists["text_offset"][len(tokens) :] == offsets
        # The likeliest two tokens, and the token itself.
        assert all(len(top) <= 3 for top in lists["top_logprobs"][1:])
        named = zip(lists["tokens"][1:], lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True)
        assert all(top[token] == logprob for token, logprob, top in named)


def test_max_tokens_0_scores_the_prompt_and_generates_nothing(server: RunningServer, hf: Any) -> None:
    tokens = tokens_of(server, SENTENCES[1])
    for prompt in (SENTENCES[1], tokens):
        answer = post(server, TEXT, {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (SENTENCES[1], "length")
        assert len(choice["logprobs"]["tokens"]) == len(tokens)
        check_echo(hf, choice["logprobs"], tokens, SENTENCES[1])
        assert answer["usage"]["completion_tokens"] == 0
    echoed = post(server, TEXT, {"prompt": "a lift", "echo": True, "max_tokens": 0})
    assert echoed["choices"][0]["text"] == "a lift"


def test_a_stream_begins_with_the_scored_prompt(server: RunningServer) -> None:
    body = GREEDY | {"prompt": SENTENCES[3], "echo": True, "logprobs": 1, "max_tokens": 4}
    whole = post(server, TEXT, body)["choices"][0]
    text, lists = "", {name: list[Any]() for name in whole["logprobs"]}
    with HTTP.stream("POST", server.url + TEXT, json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
                    for name, values in choice["logprobs"].items():
                        lists[name] += values
    assert text == whole["text"]
    assert lists["tokens"] == whole["logprobs"]["tokens"]
    assert lists["text_offset"] == whole["logprobs"]["text_offset"]
    assert lists["token_logprobs"][1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_prompt_logprobs_have_the_format_of_vllm(server: RunningServer, hf: Any) -> None:
    answer = post(server, TEXT, {"prompt": SENTENCES[0], "prompt_logprobs": 2, "max_tokens": 1})
    tokens = tokens_of(server, SENTENCES[0])
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    rows = expected(hf, tokens)
    for row, token, entry in zip(rows, tokens[1:], rest, strict=False):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
        assert own["rank"] == 1 + int((row > row[token]).sum())
        assert 2 <= len(entry) <= 3
    chat = post(server, CHAT, {"messages": HELLO, "prompt_logprobs": 0, "max_tokens": 0})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["message"]["content"] == ""


def test_a_suffix_makes_a_fill_in_the_middle_prompt() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(more_special=["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]))
    body = CompletionRequest(model="m", prompt=["a ", "c"], suffix=" b")
    prompts = TextGeneration(body, ServedModel.create("m", tokenizer)).tokenize(100).prompts
    texts = ["<fim_prefix>a <fim_suffix> b<fim_middle>", "<fim_prefix>c<fim_suffix> b<fim_middle>"]
    assert prompts == [tokenizer.encode(text) for text in texts]


def test_the_final_message_is_continued(server: RunningServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The lift "}]
    answer = post(server, CHAT, {"messages": messages, "continue_final_message": True, "max_tokens": 5})
    begin = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe lift "
    plain = post(server, TEXT, {"prompt": begin, "max_tokens": 5})
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    tokens = server.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert tokens == tokens_of(server, begin)
    unprompted = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    assert unprompted == tokens_of(server, "<|im_start|>user\nhello<|im_end|>\n")
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    refused = server.post(CHAT, GREEDY | both)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
