"""The path of every generation request, from value to value.

An endpoint has parsed the body (`GenerationRequest`). The request is admitted, which reserves capacity before any work
is done for it. Its prompts are tokenized in a thread and submitted to the engine, whose updates become the reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from chairlift.core.request import completion_ids
from chairlift.core.request_limits import RequestLimits
from chairlift.errors import InvalidParameter
from chairlift.server.dashboard.request_texts import RequestTexts
from chairlift.server.generation.admission import Admission, end_admission_for_parsing
from chairlift.server.generation.endpoint import GenerationRequest, TokenizedPrompts
from chairlift.server.generation.reply import EventStream, collect, encoded_body, first_updates, response_events
from chairlift.server.generation.tokenizer_pool import TokenizerPool
from chairlift.server.generation.usage import StreamMetrics, Usage
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EnginePort
from chairlift.server.process.streams import UpdateStream
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import ENGINE_DIED, APIError, as_api_error, timed_out
from chairlift.server.wire.messages import Submit

RETRY_SECONDS = 0.05  # between attempts to submit the rest of a request while the queue is full

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request as its endpoint has read it, and what counts for its sender."""

    request: GenerationRequest
    http: HTTPRequest
    tenant: str
    cache_salt: str  # requests with equal salts share cached prefixes


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request for which capacity is reserved until its first prompts are submitted."""

    parsed: Parsed
    num_prompts: int  # to submit at first
    limits: RequestLimits
    deadline: Deadline


@dataclass(slots=True)
class Submitted:
    """A request whose prompts are submitted, at least the first of them."""

    parsed: Parsed
    tokenized: TokenizedPrompts
    deadline: Deadline
    response_id: str
    updates: UpdateStream  # Those of the prompts that were submitted last.
    num_submitted: int = 0

    @property
    def num_left(self) -> int:
        return len(self.tokenized.prompts) - self.num_submitted

    @property
    def completion_ids(self) -> list[str]:
        """The ids of all completions, also of prompts that are not submitted yet."""
        prompts = range(len(self.tokenized.prompts))
        return [each for index in prompts for each in completion_ids(self.prompt_id(index), self.tokenized.params.n)]

    def prompt_id(self, index: int) -> str:
        return f"{self.response_id}-{index}"


class GenerationHandler:
    def __init__(
        self,
        model: ServedModel,
        engine: EnginePort,
        admission: Admission,
        tokenizer_pool: TokenizerPool,
        metrics: Metrics,
        watched_texts: Callable[[], RequestTexts | None],
        *,
        default_timeout: float | None,
        isolate_keys: bool,
    ) -> None:
        self._model = model
        self._engine = engine
        self._admission = admission
        self._tokenizer_pool = tokenizer_pool
        self._metrics = metrics
        self._watched_texts = watched_texts  # Open dashboard pages show them; None while there are none.
        self._default_timeout = default_timeout
        self._isolate_keys = isolate_keys

    async def handle(self, request: GenerationRequest, http: HTTPRequest) -> Response:
        self._model.check_name(request.body.model)
        try:
            async with self._admit(self._parsed(request, http)) as admitted:
                tokenized = await self._tokenize(admitted)
                submitted = await self._submit(admitted, tokenized)
            return await self._reply(submitted)
        except InvalidParameter as error:
            raise request.rename_error(error) from None

    def _parsed(self, request: GenerationRequest, http: HTTPRequest) -> Parsed:
        body, key = request.body, http.state.key
        # With keys, the `user` parameter must not change the tenant, which would give a client a larger share.
        tenant = http.state.tenant or body.user or ""
        salt = body.cache_salt or ""
        if self._isolate_keys and key is not None:
            salt = hashlib.sha256(key + salt.encode("utf-8", "surrogatepass")).hexdigest()
        return Parsed(request, http, tenant, salt)

    @asynccontextmanager
    async def _admit(self, parsed: Parsed) -> AsyncIterator[Admitted]:
        """Reserve capacity for the body of the `async with`. A refused request must cost no work."""
        request, http = parsed.request, parsed.http
        count = min(request.num_prompts, request.at_once or request.num_prompts)
        await end_admission_for_parsing(http)
        async with self._admission.reserve(count, request.params.num_sequences, parsed.tenant) as loaded:
            timeout = self._default_timeout if request.body.timeout is None else request.body.timeout
            yield Admitted(parsed, count, loaded.limits, Deadline(http.state.arrived, timeout))

    async def _tokenize(self, admitted: Admitted) -> TokenizedPrompts:
        request, http, limits = admitted.parsed.request, admitted.parsed.http, admitted.limits
        tokenize = partial(request.tokenize, limits.max_model_len)
        async with admitted.deadline.enforced():
            work = self._tokenizer_pool.run(admitted.parsed.tenant, len(await http.body()), tokenize)
            tokenized = await unless_disconnected(http, work)
        # The engine checks this too, but here a prompt that is too long does not reach its loop.
        longest, prompt_only = max(map(len, tokenized.prompts)), tokenized.params.max_tokens == 0
        limits.check_prompt_length(longest, request.prompt_parameter, prompt_only=prompt_only)
        if request.max_tokens is not None:
            limits.check_total_length(longest, request.max_tokens)
        return tokenized

    async def _submit(self, admitted: Admitted, tokenized: TokenizedPrompts) -> Submitted:
        parsed = admitted.parsed
        if parsed.http.state.allowance is not None:
            await parsed.http.state.allowance.charge(_most_tokens(tokenized))
        response_id = f"{parsed.request.id_prefix}{uuid.uuid4().hex}"
        submitted = Submitted(parsed, tokenized, admitted.deadline, response_id, UpdateStream([]))
        self._submit_prompts(submitted, admitted.num_prompts)
        return submitted

    def _submit_prompts(self, submitted: Submitted, count: int) -> None:
        """Submit the next `count` prompts."""
        state, messages = submitted.parsed.http.state, _messages(submitted, count)
        texts = self._watched_texts()
        observer = StreamMetrics(
            self._metrics,
            state.arrived,
            texts,
            timelines=state.timelines,
            prompt_lengths=[len(message.prompt) for message in messages],
        )
        submitted.updates = self._engine.submit(messages, observer)
        submitted.num_submitted += len(messages)
        if texts is not None:
            for message in messages:
                texts.open(completion_ids(message.request_id, message.params.n), message.prompt, state.key)

    async def _reply(self, submitted: Submitted) -> Response:
        request, http, tokenized = submitted.parsed.request, submitted.parsed.http, submitted.tokenized
        new_tracker = None if tokenized.reasoning is None else tokenized.reasoning.tracker
        usage = http.state.usage = Usage(sum(map(len, tokenized.prompts)), new_tracker=new_tracker)
        try:
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            builder = request.response_builder(submitted.response_id, submitted.completion_ids, usage)
            updates = aiter(submitted.updates)
            if not request.body.streams:
                size = await unless_disconnected(http, collect(updates, builder))
                while submitted.num_left:
                    await self._submit_more(submitted)
                    size += await unless_disconnected(http, collect(aiter(submitted.updates), builder))
                return Response(await encoded_body(builder, size), media_type="application/json")
            first = await unless_disconnected(http, first_updates(updates))
        except BaseException as error:
            self._engine.cancel(submitted.updates)
            usage.engine_died = isinstance(error, Exception) and as_api_error(error).code == ENGINE_DIED
            raise
        return EventStream(
            response_events(first, updates, builder), on_end=lambda: self._engine.cancel(submitted.updates)
        )

    async def _submit_more(self, submitted: Submitted) -> None:
        """Submit further prompts of a request, once there is room for them."""
        request, tenant = submitted.parsed.request, submitted.parsed.tenant
        count = min(submitted.num_left, request.at_once or submitted.num_left)
        while True:
            try:
                async with self._admission.reserve(count, request.params.num_sequences, tenant):
                    self._submit_prompts(submitted, count)
                    return
            except APIError as error:
                if error.status_code != 429:
                    raise
            async with submitted.deadline.enforced():
                await unless_disconnected(submitted.parsed.http, asyncio.sleep(RETRY_SECONDS))


def _messages(submitted: Submitted, count: int) -> list[Submit]:
    """Return the messages to the engine with the next `count` prompts."""
    parsed, tokenized, first = submitted.parsed, submitted.tokenized, submitted.num_submitted
    return [
        Submit(
            request_id=submitted.prompt_id(index),
            prompt=prompt,
            params=tokenized.params,
            timeout=submitted.deadline.seconds_left(),
            cache_salt=parsed.cache_salt,
            priority=parsed.request.body.priority or 0,
            tenant=parsed.tenant,
        )
        for index, prompt in enumerate(tokenized.prompts[first : first + count], first)
    ]


def _most_tokens(tokenized: TokenizedPrompts) -> int:
    """Return the tokens that a request may use, as far as its client limits them."""
    output = (tokenized.params.max_tokens or 0) * tokenized.params.num_sequences
    return sum(len(prompt) + output for prompt in tokenized.prompts)


class Deadline:
    def __init__(self, arrived: float, timeout: float | None) -> None:
        """`arrived` is a time of the monotonic clock; without a timeout there is no deadline."""
        if timeout is not None and not timeout > 0:
            raise InvalidParameter("timeout", f"must be a number of seconds above 0, got {timeout!r}")
        self._end = None if timeout is None else arrived + timeout

    def seconds_left(self) -> float | None:
        """Return the seconds left; raises a 408 error once the deadline has passed."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise timed_out()
        return left

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancel the body of the `async with` and raise a 408 error when the deadline passes."""
        try:
            async with asyncio.timeout(self.seconds_left()):
                yield
        except TimeoutError:
            raise timed_out() from None


async def unless_disconnected(http: HTTPRequest, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(_disconnect(http))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "the client closed the connection", type_="client_closed")
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()


async def _disconnect(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
