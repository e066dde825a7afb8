"""The offline API for asyncio: the engine runs in a thread of this process."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from chairlift.core.events import Event, RequestFinished
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import ChairliftError, EngineDead, InvalidParameter
from chairlift.llm import capacity, described, embedding_params, free_memory_of_engine, make_config
from chairlift.lora import LoRARequest
from chairlift.options import at_least
from chairlift.outputs import (
    ChatFormat,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Messages,
    Prompt,
    PromptInput,
    RequestOutput,
    ResultCollector,
    StreamedText,
    check_preset,
    params_of,
)

if TYPE_CHECKING:
    from chairlift.engine.adapters import EngineAdapters
    from chairlift.engine.engine import Engine
    from chairlift.engine_keywords import EngineKeywords
    from chairlift.text.tokenizer import Tokenizer

MAX_WAITING = 256
LONG_TEXT = 20_000  # characters; longer texts are tokenized in a thread


class AsyncLLM:
    """A model in this process that many tasks use at the same time.

    >>> async with AsyncLLM("smollm2-135m") as llm:
    ...     async for piece in llm.stream("Once upon a time"):
    ...         print(piece.text, end="", flush=True)

    Requests of all tasks share one continuous batch. A task that is cancelled, or that leaves an `async for` early,
    cancels its request. A slow reader delays no others: its unread output is merged. When `max_waiting` requests wait
    beyond those that can run, further calls wait until there is room.

    Options are those of `LLM`, and so are the parameters of calls without any. One event loop may use it; the
    constructor blocks until the model is loaded.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        progress: bool = True,
        max_waiting: int = MAX_WAITING,
        **options: Unpack[EngineKeywords],
    ) -> None:
        at_least(1)("max_waiting", max_waiting)
        config = make_config(options)
        from chairlift.engine.engine_thread import EngineThread  # imported late: torch takes seconds to import
        from chairlift.engine.settings import for_latency
        from chairlift.engine.startup import load_engine

        loaded = load_engine(model, for_latency(config), progress=progress)
        self.model = model
        self.embedding = loaded.embedding
        self.defaults = loaded.defaults
        self._options, self._capacity = options, capacity(loaded.engine)
        self._tokenizer = loaded.engine.tokenizer
        self._chat_format = ChatFormat(
            self._tokenizer,
            loaded.engine.reasoning_format,
            self.defaults,
            None if loaded.images is None else loaded.images.processor,
        )
        self._images = self._chat_format.images
        self._router = _Router(loaded.engine)
        self._thread = EngineThread(loaded.engine, self._router.fail_all)
        self._close = weakref.finalize(self, self._thread.stop)
        self._room = asyncio.Semaphore(loaded.engine.scheduler.max_batch_requests + max_waiting)
        self._numbers = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """The sampling parameters by name that calls without any use."""
        return self.defaults.sampling

    def get_default_sampling_params(self, preset: str | None = None) -> SamplingParams:
        """The parameters of calls without any, as in `LLM`."""
        return self._chat_format.params(preset)

    # ---- generating ---------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        preset: str | None = None,
        lora: Any = None,
    ) -> RequestOutput:
        """Complete a prompt, in any form that `LLM.generate` accepts."""
        check_preset(preset, sampling_params)
        (params,) = params_of([prompt], sampling_params, self.get_default_sampling_params(preset))
        async with self._submitted(prompt, params, timeout, lora) as request:
            return await request.finished()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        preset: str | None = None,
        lora: Any = None,
    ) -> AsyncIterator[StreamedText]:
        """Yield pieces of text as they are generated."""
        check_preset(preset, sampling_params)
        (params,) = params_of([prompt], sampling_params, self.get_default_sampling_params(preset))
        params.check_streamable()
        async with self._submitted(prompt, params, timeout, lora) as request:
            async for piece in request:
                yield piece

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        preset: str | None = None,
        lora: Any = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer a conversation. `options` are those of the chat template, `tools` and `add_generation_prompt`."""
        prompt, params = await self._chat(messages, sampling_params, preset, options)
        return await self.generate(prompt, params, timeout=timeout, lora=lora)

    async def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        preset: str | None = None,
        lora: Any = None,
        **options: Any,
    ) -> AsyncIterator[StreamedText]:
        """`stream` for a conversation."""
        prompt, params = await self._chat(messages, sampling_params, preset, options)
        async for piece in self.stream(prompt, params, timeout=timeout, lora=lora):
            yield piece

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        timeout: float | None = None,
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt; the parameters are those of `LLM.embed`."""
        self.embedding.require()
        params = embedding_params(self.embedding.kind, pooling, dimensions, normalize)
        result = await self.generate(prompt, params, timeout=timeout)
        embedding = EmbeddingOutput(result.require_vector())
        return EmbeddingRequestOutput(result.request_id, result.prompt_token_ids, embedding)

    async def _chat(
        self, messages: Messages, params: SamplingParams | None, preset: str | None, options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], SamplingParams]:
        """The prompt of a conversation and its parameters."""
        variables = dict(options.get("chat_template_kwargs") or {}, **options)
        variables.pop("chat_template_kwargs", None)
        make_prompt = partial(self._chat_format.prompt, messages, preset=preset, **variables)
        prompt = make_prompt() if self._images is None else await asyncio.to_thread(make_prompt)
        (checked,) = params_of([prompt], params, self._chat_format.params(preset, chat=True))
        return prompt, self._chat_format.after_reasoning(prompt, checked)

    # ---- requests -----------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _submitted(
        self, prompt: Prompt, params: SamplingParams, timeout: float | None, lora: Any = None
    ) -> AsyncIterator[_OpenRequest]:
        """Submit a prompt once there is room; cancel it on exit if it is not finished."""
        parsed = await self._parse(prompt)
        if lora is not None:
            parsed.options = {**parsed.options, "lora": lora}
        async with self._room:
            request_id = f"async-{next(self._numbers)}"
            request = _OpenRequest(request_id, parsed, params, self._tokenizer)
            submitting = self._thread.call(lambda: self._router.submit(request, timeout))
            try:
                await asyncio.wrap_future(submitting)
                yield request
            finally:
                if not request.done or request.error is not None:  # Other completions may be running after an error.
                    self._thread.call(lambda: self._router.cancel(request))

    async def _parse(self, prompt: Prompt) -> PromptInput:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        has_images = isinstance(prompt, Mapping) and not prompt.keys().isdisjoint(("images", "multi_modal_data"))
        if has_images or (isinstance(text, str) and len(text) > LONG_TEXT):
            return await asyncio.to_thread(PromptInput.parse, prompt, self._tokenizer, self._images)
        return PromptInput.parse(prompt, self._tokenizer, self._images)

    # ---- adapters -----------------------------------------------------------------------------------------------

    async def load_lora(self, name: str, path: str) -> None:
        """As `LLM.load_lora`."""
        adapters = self._router.adapters
        adapter = await asyncio.to_thread(adapters.read, name, path)
        await asyncio.wrap_future(self._thread.call(lambda: adapters.register(adapter)))

    async def unload_lora(self, name: str) -> None:
        """As `LLM.unload_lora`."""
        pool = self._router.adapters.pool
        await asyncio.wrap_future(self._thread.call(lambda: pool.unregister(pool.find(name).name)))

    # ---- end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop the engine and free its memory; open requests and further calls raise EngineDead."""
        if self._close.alive:
            await asyncio.to_thread(self._close)
            del self._router
            await asyncio.to_thread(free_memory_of_engine)

    def __repr__(self) -> str:
        return described(self, self.model, self._options, self._capacity if self._close.alive else None)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _OpenRequest:
    """A request between the engine's thread, which collects its output, and the task that reads it."""

    def __init__(self, request_id: str, prompt: PromptInput, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.id = request_id
        self.prompt = prompt
        self.params = params
        self.collector = ResultCollector(tokenizer)  # The collector belongs to the engine's thread.
        self.done = False
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._unread: dict[int, StreamedText] = {}  # The keys are numbers of completions.
        self.error: Exception | None = None

    # Called in the engine's thread.

    def deliver(self, error: Exception | None = None) -> None:
        """Pass new output to the reading task."""
        pieces, done = self.collector.pieces(), error is not None or not self.collector.num_open
        try:
            self._loop.call_soon_threadsafe(self._receive, pieces, done, error)
        except RuntimeError:  # the loop was closed, so there is no reader
            return

    # Called in the event loop.

    def _receive(self, pieces: Sequence[StreamedText], done: bool, error: Exception | None) -> None:
        for piece in pieces:
            before = self._unread.get(piece.completion_index)
            self._unread[piece.completion_index] = piece if before is None else _joined(before, piece)
        self.done = self.done or done
        self.error = self.error or error
        self._changed.set()

    async def finished(self) -> RequestOutput:
        """Wait for the whole result."""
        while not self.done:
            await self._wait()
        if self.error is not None:
            raise self.error
        return self.collector.results[0]

    async def __aiter__(self) -> AsyncIterator[StreamedText]:
        while not self.done or self._unread:
            if not self._unread:
                await self._wait()
            pieces, self._unread = self._unread, {}
            for piece in pieces.values():
                yield piece
        if self.error is not None:
            raise self.error

    async def _wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()


class _Router:
    """The open requests of an engine, by the ids of their completions; used in the engine's thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: dict[str, _OpenRequest] = {}
        engine.subscribe(self._on_events)

    def submit(self, request: _OpenRequest, timeout: float | None) -> None:
        prompt = request.prompt
        named = prompt.options.get("lora")
        if isinstance(named, LoRARequest) and self._engine.adapters is not None:
            named.register(self._engine.adapters)
        ids = self._engine.submit(
            prompt.token_ids, request.params, request_id=request.id, timeout=timeout, **prompt.options
        )
        request.collector.add(ids, prompt, request.params, self._engine.now())
        self._open.update(dict.fromkeys(ids, request))

    @property
    def adapters(self) -> EngineAdapters:
        if self._engine.adapters is None:
            raise InvalidParameter("lora", "this engine has no adapters; start it with lora or max_loras")
        return self._engine.adapters

    def cancel(self, request: _OpenRequest) -> None:
        for request_id in request.collector.open_ids():
            self._open.pop(request_id, None)
            self._engine.cancel(request_id)

    def fail_all(self, error: Exception) -> None:
        dead = error if isinstance(error, ChairliftError) else EngineDead(f"the engine stopped after an error: {error}")
        for request in set(self._open.values()):
            request.deliver(dead)
        self._open.clear()

    def _on_events(self, events: Sequence[Event]) -> None:
        if self._engine.fatal is not None:
            return  # `fail_all` follows
        changed: dict[_OpenRequest, Exception | None] = {}
        for event in events:
            request = self._open.get(getattr(event, "request_id", ""))
            if request is None:
                continue
            request.collector.add_events([event])
            changed.setdefault(request, None)
            if isinstance(event, RequestFinished):
                del self._open[event.request_id]
                if event.ending.parameter is not None:  # found to be invalid only after its submission
                    changed[request] = InvalidParameter(event.ending.parameter, str(event.ending.detail))
        for request, error in changed.items():
            request.deliver(error)


def _joined(first: StreamedText, second: StreamedText) -> StreamedText:
    return replace(second, text=first.text + second.text, token_ids=first.token_ids + second.token_ids)
