"""The real OpenAI client against the real server."""

from __future__ import annotations

import asyncio
from itertools import accumulate

import openai
import pytest

from tests.server.running_server import NAME, RunningServer

MESSAGES = [{"role": "user", "content": "when does the lift stop?"}]
GREEDY = {"model": NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_chat(server: RunningServer) -> None:
    answer = server.client().chat.completions.create(messages=MESSAGES, max_tokens=12, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.model == NAME
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_streamed_chat_adds_up(server: RunningServer) -> None:
    client = server.client()
    whole = client.chat.completions.create(messages=MESSAGES, max_tokens=20, n=2, seed=5, model=NAME, temperature=1.0)
    texts, reasons, roles = ["", ""], [None, None], [0, 0]
    usage = None
    stream = client.chat.completions.create(
        messages=MESSAGES,
        max_tokens=20,
        n=2,
        seed=5,
        model=NAME,
        temperature=1.0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == [1, 1]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_stream_starts_with_the_role_and_has_the_fingerprint(server: RunningServer) -> None:
    client, body = server.client(), {"model": NAME, "max_tokens": 3, "n": 2, "messages": MESSAGES}
    chunks = list(client.chat.completions.create(stream=True, **body))
    for index in range(2):
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices[0].index == index]
        assert (deltas[0].role, deltas[0].content) == ("assistant", "")
        assert all(delta.role is None for delta in deltas[1:])
    fingerprints = {chunk.system_fingerprint for chunk in chunks}
    fingerprints.add(client.chat.completions.create(**body).system_fingerprint)
    fingerprints.add(client.completions.create(model=NAME, prompt="hello", max_tokens=1).system_fingerprint)
    assert len(fingerprints) == 1
    assert str(fingerprints.pop()).startswith("fp_")


def test_completions_of_several_prompts(server: RunningServer) -> None:
    client = server.client()
    prompts = ["a chairlift", "many sequences", "blocks"]
    answer = client.completions.create(prompt=prompts, max_tokens=5, n=2, echo=True, **GREEDY)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, choice in enumerate(answer.choices):
        assert choice.text.startswith(prompts[index // 2])
    one = client.completions.create(prompt=prompts[1], max_tokens=5, **GREEDY)
    assert answer.choices[2].text == prompts[1] + one.choices[0].text


def test_token_ids_as_prompt(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"prompt": "a ragged batch"}).json()["tokens"]
    client = server.client()
    by_text = client.completions.create(prompt="a ragged batch", max_tokens=6, **GREEDY)
    by_ids = client.completions.create(prompt=tokens, max_tokens=6, **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "a ragged batch"


def test_stop_strings_and_logprobs(server: RunningServer) -> None:
    client = server.client()
    whole = client.completions.create(prompt="the engine", max_tokens=20, **GREEDY).choices[0].text
    stop = whole[5:8]
    cut = client.completions.create(prompt="the engine", max_tokens=20, stop=[stop], **GREEDY).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY)
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    text = client.completions.create(prompt="the engine", max_tokens=4, logprobs=2, **GREEDY)
    result = text.choices[0].logprobs
    assert len(result.token_logprobs) == 4
    assert result.text_offset == [0, *accumulate(map(len, result.tokens[:-1]))]
    stream = client.completions.create(prompt="the engine", max_tokens=4, logprobs=2, stream=True, **GREEDY)
    chunks = [chunk.choices[0].logprobs for chunk in stream]
    assert [offset for chunk in chunks for offset in chunk.text_offset] == result.text_offset


def test_concurrent_requests_get_their_own_responses(server: RunningServer) -> None:
    async def complete(client: openai.AsyncOpenAI, index: int) -> str:
        answer = await client.completions.create(prompt=f"request number {index}", max_tokens=8, **GREEDY)
        return answer.choices[0].text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
            return await asyncio.gather(*(complete(client, index % 20) for index in range(100)))

    together = asyncio.run(all_of_them())
    client = server.client()
    for index in range(20):
        prompt = f"request number {index}"
        alone = client.completions.create(prompt=prompt, max_tokens=8, **GREEDY).choices[0].text
        assert {together[i] for i in range(index, 100, 20)} == {alone}
    server.wait_idle()


def test_cached_tokens_are_reported(server: RunningServer) -> None:
    client = server.client()
    prompt = "many sequences are concatenated without padding into one ragged batch of tokens for the model"
    client.completions.create(prompt=prompt, max_tokens=2, **GREEDY)
    names = ("chairlift_prompt_tokens_total", "chairlift_prompt_tokens_cached_total")
    before = [server.metric(name) for name in names]
    usage = client.completions.create(prompt=prompt, max_tokens=2, n=3, **GREEDY).usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached >= 16
    after = [server.metric(name) for name in names]
    assert after == [before[0] + usage.prompt_tokens, before[1] + cached]


def test_models_and_errors_of_the_official_client(server: RunningServer) -> None:
    client = server.client()
    (model,) = client.models.list().data
    assert model.id == NAME
    assert model.max_model_len == 256
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as bad:
        list(client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1, stream=True))
    assert bad.value.param == "temperature"
