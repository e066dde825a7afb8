"""A tokenizer or chat template that fails on some texts: clients get errors in OpenAI's format, others are served."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from chairlift.text.tokenizer import Tokenizer
from tests.server.front_end import NAME, front_end
from tests.server.running_server import HTTP
from tests.tiny import CHATML, byte_level_tokenizer

PANIC = "a" * 40 + "b"  # more backtracking than the regular expression library allows: it panics
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def test_a_panic_of_the_tokenizer_is_an_error_of_the_request() -> None:
    backend = byte_level_tokenizer()
    catastrophic = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([catastrophic, backend.pre_tokenizer])
    with front_end(tokenizer=Tokenizer(backend, chat_template=CHATML)) as front:
        for path, body in (
            ("/v1/completions", {"model": NAME, "prompt": PANIC}),
            ("/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": PANIC}]}),
            ("/v1/responses", {"model": NAME, "input": PANIC, "stream": True}),
            ("/tokenize", {"prompt": PANIC}),
        ):
            answer = HTTP.post(front.url + path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert "tokenizer" in error["message"]
            assert "Onig" not in error["message"]
        assert HTTP.post(front.url + "/v1/chat/completions", json={"model": NAME, **HELLO}).status_code == 200
