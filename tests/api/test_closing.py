"""The end of `LLM` and `AsyncLLM`, after which memory and threads are free; and what they and results look like."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, CompletionOutput, EngineDead, SamplingParams, Structure
from tests.tiny import write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
JSON = GREEDY.clone(structure=Structure.json_object())  # Its grammar is compiled in threads of the engine.
QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


def engine_threads() -> set[str]:
    """The threads of engines; those of the kernels belong to the process."""
    return {
        thread.name for thread in threading.enumerate() if thread.name.startswith(("grammar", "masks", "chairlift-en"))
    }


def parts_of(engine: Any, runner: Any) -> list[weakref.ref[Any]]:
    return [weakref.ref(part) for part in (engine, runner, runner.model, engine.scheduler)]


def test_closing_frees_memory_and_threads(model: str) -> None:
    before = engine_threads()
    with LLM(model, kv_memory="2MiB", progress=False) as llm:
        parts = parts_of(llm.engine, llm.runner)
        assert llm.generate("a", JSON, use_tqdm=False)[0].finished
        assert engine_threads() > before
        result = llm.chat(QUESTION, GREEDY, use_tqdm=False)[0]
    assert [part() for part in parts] == [None] * len(parts)
    assert engine_threads() == before
    assert result.outputs[0].text  # Results outlive the engine.
    llm.close()
    assert repr(llm) == f"<LLM({model!r}, kv_memory='2MiB'): closed>"


def test_calls_after_the_end_are_refused(model: str) -> None:
    llm = LLM(model, kv_memory="2MiB", progress=False)
    stream = llm.stream("a", GREEDY)
    next(stream)
    assert repr(llm) == f"<LLM({model!r}, kv_memory='2MiB'): context of 256 tokens, 64 requests per step>"
    llm.close()
    calls = [
        lambda: llm.generate("a"),
        lambda: llm.chat(QUESTION),
        lambda: llm.stream("a"),
        lambda: llm.stream_chat(QUESTION),
        lambda: llm.embed("a"),
        lambda: llm.engine,
        llm.get_tokenizer,
        lambda: next(stream),
    ]
    for call in calls:
        with pytest.raises(EngineDead, match=r"this LLM of .* was closed; make another one"):
            call()


def test_closing_an_async_engine_frees_it(model: str) -> None:
    async def use() -> tuple[AsyncLLM, list[weakref.ref[Any]]]:
        async with AsyncLLM(model, kv_memory="2MiB", progress=False) as llm:
            engine = llm._router._engine
            parts = parts_of(engine, engine.executor)
            del engine
            assert (await llm.generate("a", JSON)).finished
            assert "context of 256 tokens" in repr(llm)
        await llm.close()
        for call in (llm.generate("a"), llm.chat(QUESTION)):
            with pytest.raises(EngineDead, match="the engine was closed"):
                await call
        return llm, parts

    before = engine_threads()
    llm, parts = asyncio.run(use())
    assert [part() for part in parts] == [None] * len(parts)
    assert engine_threads() == before
    assert repr(llm).endswith("closed>")


# ---- what parameters and results look like --------------------------------------------------------------------------


def test_parameters_show_what_differs_from_the_defaults() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(temperature=0, top_k=-1, stop="x", max_tokens=None, logit_bias={3: 1.5})
    assert repr(params) == "SamplingParams(temperature=0, logit_bias={3: 1.5}, max_tokens=None, stop=('x',))"
    assert eval(repr(params)) == params


def test_results_are_shown_shortly() -> None:
    output = CompletionOutput(0, "word " * 1000, list(range(1000)), finish_reason="length")
    shown = repr(output)
    assert shown.startswith("CompletionOutput(index=0, text='word word")
    assert shown.endswith("token_ids=[0, 1, 2, 3, 4, 5, ...], finish_reason='length')")
    assert len(shown) < 250
