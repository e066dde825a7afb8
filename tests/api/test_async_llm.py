"""AsyncLLM: many tasks, one engine in a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, SamplingParams, Structure
from chairlift.core.events import RequestFinished
from chairlift.core.integrity import check_quiescent
from chairlift.core.request import Ending, FinishReason, Request
from chairlift.errors import EngineDead, InvalidParameter
from tests.tiny import SENTENCES, write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "when does the lift stop?"}]
OPTIONS: dict[str, Any] = {"kv_memory": "4MiB", "max_batch_requests": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def blocking(folder: Path) -> LLM:
    return LLM(str(folder), **OPTIONS)


@pytest.fixture(scope="module")
def run(folder: Path) -> Any:
    """Run coroutines, one after the other, in one event loop with one AsyncLLM."""
    loop = asyncio.new_event_loop()
    llm = AsyncLLM(str(folder), max_waiting=4, **OPTIONS)

    def run(work: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
        async def checked() -> Any:
            result = await asyncio.wait_for(work(llm), 60)
            await until_idle(llm)
            return result

        return loop.run_until_complete(checked())

    yield run
    loop.run_until_complete(llm.close())
    loop.close()


async def until_idle(llm: AsyncLLM) -> None:
    """Wait until the engine has no work, and check that it holds no blocks."""
    engine = llm._router._engine
    while await asyncio.wrap_future(llm._thread.call(lambda: engine.has_work)):
        await asyncio.sleep(0.01)
    await asyncio.wrap_future(llm._thread.call(lambda: check_quiescent(engine.scheduler)))
    assert not llm._router._open


async def joined(pieces: AsyncIterator[Any]) -> str:
    return "".join([piece.text async for piece in pieces])


def test_many_tasks_get_the_results_of_llm(run: Any, blocking: LLM) -> None:
    prompts = [*SENTENCES, *(f"lift {number}" for number in range(20))]
    expected = blocking.generate(prompts, GREEDY, use_tqdm=False)
    found = run(lambda llm: asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts)))
    assert [one.outputs[0].text for one in found] == [one.outputs[0].text for one in expected]
    streamed = run(lambda llm: asyncio.gather(*(joined(llm.stream(prompt, GREEDY)) for prompt in prompts)))
    assert streamed == [one.outputs[0].text for one in expected]


def test_chats_and_embeddings(run: Any, blocking: LLM) -> None:
    expected = blocking.chat(MESSAGES, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert run(lambda llm: llm.chat(MESSAGES, GREEDY)).outputs[0].text == expected
    assert run(lambda llm: joined(llm.stream_chat(MESSAGES, GREEDY))) == expected
    (vector,) = blocking.embed("a lift", use_tqdm=False)
    assert run(lambda llm: llm.embed("a lift")).outputs.embedding == pytest.approx(vector.outputs.embedding, abs=1e-5)
    scored = run(lambda llm: llm.generate("a lift", GREEDY.clone(prompt_logprobs=1, n=2)))
    assert len(scored.prompt_logprobs) == len(scored.prompt_token_ids)
    assert [output.index for output in scored.outputs] == [0, 1]


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, "greedy"])
def test_what_are_no_parameters_is_refused(run: Any, params: Any) -> None:
    for call in (
        lambda llm: llm.generate("a", params),
        lambda llm: llm.chat(MESSAGES, params),
        lambda llm: joined(llm.stream("a", params)),
        lambda llm: joined(llm.stream_chat(MESSAGES, params)),
    ):
        with pytest.raises(InvalidParameter, match="sampling_params: must be SamplingParams, got"):
            run(call)


def test_leaving_a_stream_early_cancels_the_request(run: Any) -> None:
    async def leave(llm: AsyncLLM) -> int:
        pieces = llm.stream("a", GREEDY.clone(max_tokens=200))
        async for piece in pieces:
            await pieces.aclose()  # type: ignore[attr-defined]
            return len(piece.token_ids)
        return 0

    assert 0 < run(leave) < 200


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_a_cancelled_task_cancels_its_request(run: Any, seconds: float) -> None:
    async def cancel(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(llm.generate("a", GREEDY.clone(max_tokens=200))) for _ in range(12)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)

    run(cancel)
    assert len(run(lambda llm: llm.generate("a", GREEDY)).outputs[0].token_ids) == 12


def test_a_slow_reader_gets_its_unread_output_as_one_piece(run: Any, blocking: LLM) -> None:
    async def read(llm: AsyncLLM) -> list[str]:
        texts = []
        async for piece in llm.stream("a chair", GREEDY.clone(max_tokens=60)):
            texts.append(piece.text)
            await llm.generate("b", GREEDY.clone(max_tokens=100))  # meanwhile all of the stream is generated
        return texts

    texts = run(read)
    assert len(texts) < 10
    expected = blocking.generate("a chair", GREEDY.clone(max_tokens=60), use_tqdm=False)
    assert "".join(texts) == expected[0].outputs[0].text


def test_calls_wait_while_too_many_requests_are_open(run: Any) -> None:
    """Four run and four wait; the others are not submitted before there is room."""
    most = 0

    async def flood(llm: AsyncLLM) -> None:
        nonlocal most

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(llm._router._open))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(llm.generate("a", GREEDY) for _ in range(40)))
        watching.cancel()

    run(flood)
    assert 4 <= most <= 8


def test_bad_input_is_refused_by_name(run: Any) -> None:
    async def refused(llm: AsyncLLM) -> list[str]:
        impossible = Structure.json({"type": "object", "patternProperties": {"(": {}}})
        names = []
        for prompt, params in (
            ("", GREEDY),
            ([10**6], GREEDY),
            ("a", GREEDY.clone(ignore_eos=False, structure=impossible)),
            ({"prompt": "a", "colour": 1}, GREEDY),
        ):
            with pytest.raises(InvalidParameter) as caught:
                await llm.generate(prompt, params)
            names.append(caught.value.parameter)
        with pytest.raises(InvalidParameter):
            await anext(llm.stream("a", GREEDY.clone(ignore_eos=False, beam_width=2)))
        return names

    assert run(refused) == ["prompt", "prompt", "structure", "prompt"]


def test_a_timeout_ends_a_request(run: Any) -> None:
    result = run(lambda llm: llm.generate("a", GREEDY.clone(max_tokens=200), timeout=0.001))
    assert result.outputs[0].finish_reason == "deadline"


def test_a_completion_that_fails_cancels_its_siblings(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(llm: AsyncLLM) -> int:
        engine = llm._router._engine
        structured, finished = engine.structured, list[RequestFinished]()
        assert structured is not None
        engine.subscribe(lambda events: finished.extend(one for one in events if isinstance(one, RequestFinished)))
        params = GREEDY.clone(max_tokens=200, n=3, structure=Structure.regex("a+", "regex"))
        monkeypatch.setattr(structured, "ending", failing)
        with pytest.raises(InvalidParameter, match="regex: too complex"):
            await llm.generate("a", params)
        await until_idle(llm)
        return sum(one.ending.reason is FinishReason.CANCELLED for one in finished)

    def failing(request: Request) -> Ending | None:
        if request.leader is None and request.num_output == 3:
            return Ending(FinishReason.ERROR, "too complex", "regex")
        return None

    assert run(generate) == 2


def test_closing_ends_open_requests(folder: Path) -> None:
    async def close() -> None:
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            task = asyncio.create_task(llm.generate("a", GREEDY.clone(max_tokens=240)))
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDead):
            await task
        with pytest.raises(EngineDead):
            await llm.generate("a", GREEDY)

    asyncio.run(close())


def test_a_failed_step_fails_open_requests_and_later_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        llm = AsyncLLM(str(folder), **OPTIONS)

        def launch(plan: Any) -> Any:
            raise RuntimeError("broken")

        monkeypatch.setattr(llm._router._engine.executor, "launch", launch)
        for _ in range(2):
            with pytest.raises(EngineDead):
                await llm.generate("a", GREEDY)
        await llm.close()

    asyncio.run(fail())


def test_a_forgotten_llm_ends_its_thread(folder: Path) -> None:
    async def forget() -> threading.Thread:
        llm = AsyncLLM(str(folder), **OPTIONS)
        await llm.generate("a", GREEDY)
        return llm._thread._thread

    thread = asyncio.run(forget())
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
