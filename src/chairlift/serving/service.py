"""Between HTTP and the engine: admission, tokenising, streams, and the clock on every request."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from chairlift.core.sampling import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.serving.api_types import ChatRequest, Completing, CompletionRequest, Sampling
from chairlift.serving.engine_client import EngineClient, EngineState, Stream
from chairlift.serving.errors import APIError, as_api_error, unavailable
from chairlift.serving.messages import Submit, Update
from chairlift.serving.metrics import Metrics
from chairlift.serving.replies import Answer, ChatShape, Reply, Shape, TextShape, Usage, json_encoder
from chairlift.text.tokenizer import Tokenizer

# Words an answer, given its id, those of its completions, and where its tokens are counted.
Wording = Callable[[str, list[str], Usage], Answer]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask for at most."""

    max_waiting: int = 256  # completions beyond the seats; more are answered with 429
    max_completions: int = 128  # prompts x n of one request
    max_body_bytes: int = 8 * 2**20
    default_timeout: float | None = None  # seconds, for requests that give none


class Service:
    def __init__(
        self, model_name: str, tokenizer: Tokenizer, engine: EngineClient, metrics: Metrics, limits: Limits
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.engine = engine
        self.metrics = metrics
        self.limits = limits
        self.draining = False
        self.created = int(time.time())

    # ---- the two endpoints ---------------------------------------------------------------------------------------

    async def complete(self, body: CompletionRequest, http: HTTPRequest) -> Response:
        params = body.params()
        texts = body.prompts()
        prompts = await asyncio.to_thread(self._encode_all, texts)
        echoes = [self._echo(text) if body.echo else "" for text in texts for _ in range(params.n)]
        shape = TextShape(body.logprobs is not None, echoes)
        return await self._answer(body, http, params, prompts, "cmpl-", self._wording(shape, body))

    async def chat(self, body: ChatRequest, http: HTTPRequest) -> Response:
        params = body.params()
        prompt = await asyncio.to_thread(self.encode_chat, body)
        wording = self._wording(ChatShape(bool(body.logprobs)), body)
        return await self._answer(body, http, params, [prompt], "chatcmpl-", wording)

    def _wording(self, shape: Shape, body: Completing) -> Wording:
        return partial(
            Reply,
            shape,
            self.model_name,
            self.tokenizer,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )

    def encode_chat(self, body: ChatRequest) -> list[int]:
        options: dict[str, Any] = dict(body.chat_template_kwargs or {})
        for reserved in ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize"):
            if reserved in options:
                raise InvalidParameter("chat_template_kwargs", f"{reserved!r} cannot be set there")
        if body.add_generation_prompt is not None:
            options["add_generation_prompt"] = body.add_generation_prompt
        return self.tokenizer.encode_chat(body.messages, **options)[1]

    def _encode_all(self, texts: Sequence[str | list[int]]) -> list[list[int]]:
        return [self.tokenizer.encode(text) if isinstance(text, str) else check_ids("prompt", text) for text in texts]

    def _echo(self, text: str | list[int]) -> str:
        return text if isinstance(text, str) else self.tokenizer.decode(text)

    # ---- admission -----------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            problem = f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}"
            raise APIError(404, problem, param="model", code="model_not_found")

    def _admit(self, num_completions: int) -> None:
        if self.draining:
            self.metrics.refused.labels("503").inc()
            raise unavailable("the server is shutting down")
        if self.engine.state is not EngineState.READY or self.engine.loaded is None:
            self.metrics.refused.labels("503").inc()
            raise unavailable(f"the engine is {self.engine.state.value}")
        if num_completions > self.limits.max_completions:
            problem = f"{num_completions} completions in one request; the limit is {self.limits.max_completions}"
            raise InvalidParameter("n", problem)
        room = self.engine.loaded.max_batch_requests + self.limits.max_waiting - self.engine.num_open
        if num_completions > room:
            self.metrics.refused.labels("429").inc()
            raise APIError(
                429,
                "the queue is full; try again in a moment",
                type_="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    def _check_lengths(self, prompts: Sequence[list[int]]) -> None:
        """The engine would say so too, but all others would wait while it reads millions of tokens."""
        assert self.engine.loaded is not None
        longest, limit = max(map(len, prompts)), self.engine.loaded.max_model_len
        if longest >= limit:
            problem = f"has {longest} tokens, but at most {limit - 1} leave room for an answer"
            raise InvalidParameter("prompt", f"{problem} (max_model_len is {limit})")

    async def _answer(
        self,
        body: Sampling,
        http: HTTPRequest,
        params: SamplingParams,
        prompts: Sequence[list[int]],
        id_prefix: str,
        wording: Wording,
    ) -> Response:
        self.check_model(body.model)
        self._admit(len(prompts) * params.n)
        self._check_lengths(prompts)
        answer_id = f"{id_prefix}{uuid.uuid4().hex}"
        timeout = self.limits.default_timeout if body.timeout is None else body.timeout
        requests = [
            Submit(f"{answer_id}-{index}", prompt, params, timeout, body.cache_salt or "")
            for index, prompt in enumerate(prompts)
        ]
        usage = Usage(prompt_tokens=sum(map(len, prompts)))
        begun = time.monotonic()
        stream = self.engine.submit(requests)
        answer = wording(answer_id, stream.ids, usage)
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        watched = self._watched(stream, begun, usage)
        if not body.stream:
            return await self._whole(http, stream, watched, answer)
        # Errors that show before the first token still get a status of their own.
        first = await self._or_gone(http, stream, _first(watched))
        return EventStream(_events(first, watched, answer), on_end=lambda: self.engine.cancel(stream))

    # ---- answers -------------------------------------------------------------------------------------------------

    async def _whole(
        self, http: HTTPRequest, stream: Stream, updates: AsyncIterator[list[Update]], answer: Answer
    ) -> Response:
        async def collect() -> None:
            async for batch in updates:
                for update in batch:
                    answer.usage.take_in(update)
                    _raise_if_cut_short(update)
                    answer.keep(update)

        await self._or_gone(http, stream, collect())
        return Response(json_encoder.encode(answer.body()), media_type="application/json")

    async def _or_gone(self, http: HTTPRequest, stream: Stream, work: Any) -> Any:
        """Await `work`, but drop it and the request as soon as the client has gone away."""
        task = asyncio.ensure_future(work)
        gone = asyncio.create_task(_disconnected(http))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise APIError(499, "the client closed the connection", type_="client_closed")
            return task.result()
        except BaseException:
            self.engine.cancel(stream)
            raise
        finally:
            task.cancel()
            gone.cancel()

    async def _watched(self, stream: Stream, begun: float, usage: Usage) -> AsyncIterator[list[Update]]:
        """The stream, with every token's time noted on the way."""
        last: dict[str, float] = {}
        try:
            async for batch in stream:
                now = time.monotonic()
                for update in batch:
                    if update.tokens:
                        before = last.get(update.request_id)
                        if before is None:
                            self.metrics.first_token.observe(now - begun)
                        else:
                            self.metrics.inter_token.observe((now - before) / len(update.tokens))
                        last[update.request_id] = now
                        self.metrics.output_tokens.inc(len(update.tokens))
                    if update.finish_reason is not None:
                        self.metrics.end_to_end.observe(now - begun)
                        self.metrics.requests.labels(update.finish_reason).inc()
                yield batch
        finally:
            self.metrics.cached_tokens.inc(usage.cached_tokens)


def check_ids(parameter: str, tokens: list[int]) -> list[int]:
    """Refuse numbers that no message can carry; whether the vocabulary has them is the engine's to say."""
    for token in tokens:
        if not 0 <= token < 2**31:
            raise InvalidParameter(parameter, f"token id {str(token)[:40]} is out of range")
    return tokens


class EventStream(StreamingResponse):
    """Server-sent events; `on_end` runs however the response ends, even if it never got to begin."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Any) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _first(updates: AsyncIterator[list[Update]]) -> list[Update]:
    batch = await anext(updates)
    for update in batch:
        _raise_if_cut_short(update)
    return batch


def _raise_if_cut_short(update: Update) -> None:
    """Endings that are no answer."""
    if update.finish_reason == "deadline":
        raise APIError(
            408, "the request's timeout passed before it was finished", type_="timeout_error", code="timeout"
        )
    if update.finish_reason in ("error", "cancelled"):
        raise APIError(500, "the request could not be finished", type_="server_error")


async def _events(first: list[Update], updates: AsyncIterator[list[Update]], answer: Answer) -> AsyncIterator[bytes]:
    try:
        for event in _events_of(first, answer):
            yield event
        async for batch in updates:
            for event in _events_of(batch, answer):
                yield event
        for event in answer.ending():
            yield event
    except Exception as error:
        for event in answer.failure(as_api_error(error)):
            yield event


def _events_of(batch: list[Update], answer: Answer) -> list[bytes]:
    events: list[bytes] = []
    for update in batch:
        answer.usage.take_in(update)
        _raise_if_cut_short(update)
        events += answer.events(update)
    return events


async def _disconnected(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
