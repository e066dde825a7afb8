"""The path of every generation request: admit, tokenize, submit, respond."""

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

from starlette.requests import Request
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from chairlift.core.request import completion_ids
from chairlift.errors import InvalidParameter
from chairlift.server.dashboard.request_texts import RequestTexts
from chairlift.server.generation.admission import Admission, end_admission_for_parsing
from chairlift.server.generation.endpoint import EngineBody, GenerationRequest, TokenizedPrompts
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


@dataclass(slots=True)
class _Submission:
    """A request whose prompts are submitted, at least the first of them."""

    response_id: str
    tokenized: TokenizedPrompts
    deadline: Deadline
    updates: UpdateStream  # of the prompts submitted last
    num_submitted: int

    @property
    def completion_ids(self) -> list[str]:
        """The ids of all completions, also of prompts that are not submitted yet."""
        prompts = range(len(self.tokenized.prompts))
        return [one for index in prompts for one in completion_ids(self.prompt_id(index), self.tokenized.params.n)]

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
        self._watched_texts = watched_texts  # of requests, for open dashboard pages; None while there are none
        self._default_timeout = default_timeout
        self._isolate_keys = isolate_keys

    async def handle(self, request: GenerationRequest, http: HTTPRequest) -> Response:
        self._model.check_name(request.body.model)
        try:
            submission = await self._submit(request, http)
            return await self._respond(request, submission, http)
        except InvalidParameter as error:
            raise request.rename_error(error) from None

    async def _submit(self, request: GenerationRequest, http: HTTPRequest) -> _Submission:
        """Admit, tokenize and submit a request. Admission comes first: a refused request must cost no work."""
        count = min(request.num_prompts, request.at_once or request.num_prompts)
        await end_admission_for_parsing(http)
        tenant = _tenant(request.body, http)
        async with self._admission.reserve(count, request.params.num_sequences, tenant) as loaded:
            timeout = self._default_timeout if request.body.timeout is None else request.body.timeout
            deadline = Deadline(http.state.arrived, timeout)
            tokenize = partial(request.tokenize, loaded.limits.max_model_len)
            async with deadline.enforced():
                work = self._tokenizer_pool.run(tenant, len(await http.body()), tokenize)
                tokenized = await unless_disconnected(http, work)
            # The engine checks this too, but here a prompt that is too long does not reach its loop.
            longest, prompt_only = max(map(len, tokenized.prompts)), tokenized.params.max_tokens == 0
            loaded.limits.check_prompt_length(longest, request.prompt_parameter, prompt_only=prompt_only)
            if request.max_tokens is not None:
                loaded.limits.check_total_length(longest, request.max_tokens)

            if http.state.allowance is not None:
                await http.state.allowance.charge(_most_tokens(tokenized))

            response_id = f"{request.id_prefix}{uuid.uuid4().hex}"
            submission = _Submission(response_id, tokenized, deadline, UpdateStream([]), num_submitted=0)
            self._submit_prompts(submission, count, request.body, http)
        return submission

    def _submit_prompts(self, submission: _Submission, count: int, body: EngineBody, http: HTTPRequest) -> None:
        """Submit the next `count` prompts."""
        messages = self._messages(submission, count, body, http)
        texts = self._watched_texts()
        observer = StreamMetrics(
            self._metrics,
            http.state.arrived,
            texts,
            timelines=http.state.timelines,
            prompt_lengths=[len(message.prompt) for message in messages],
        )
        submission.updates = self._engine.submit(messages, observer)
        submission.num_submitted += len(messages)
        if texts is not None:
            for message in messages:
                texts.open(completion_ids(message.request_id, message.params.n), message.prompt, http.state.key)

    def _messages(self, submission: _Submission, count: int, body: EngineBody, http: HTTPRequest) -> list[Submit]:
        first, tokenized = submission.num_submitted, submission.tokenized
        return [
            Submit(
                request_id=submission.prompt_id(index),
                prompt=prompt,
                params=tokenized.params,
                timeout=submission.deadline.seconds_left(),
                cache_salt=self._cache_salt(body, http),
                priority=body.priority or 0,
                tenant=_tenant(body, http),
            )
            for index, prompt in enumerate(tokenized.prompts[first : first + count], first)
        ]

    def _cache_salt(self, body: EngineBody, http: HTTPRequest) -> str:
        """Return the cache salt: requests with equal salts share cached prefixes. With isolated keys it contains the
        key."""
        given, key = body.cache_salt or "", http.state.key
        if not self._isolate_keys or key is None:
            return given
        return hashlib.sha256(key + given.encode("utf-8", "surrogatepass")).hexdigest()

    async def _respond(self, request: GenerationRequest, submission: _Submission, http: HTTPRequest) -> Response:
        reasoning, prompts = submission.tokenized.reasoning, submission.tokenized.prompts
        new_tracker = None if reasoning is None else reasoning.tracker
        usage = http.state.usage = Usage(sum(map(len, prompts)), new_tracker=new_tracker)
        try:
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            builder = request.response_builder(submission.response_id, submission.completion_ids, usage)
            updates = aiter(submission.updates)
            if not request.body.streams:
                size = await unless_disconnected(http, collect(updates, builder))
                while submission.num_submitted < len(prompts):
                    await self._submit_more(request, submission, http)
                    size += await unless_disconnected(http, collect(aiter(submission.updates), builder))
                return Response(await encoded_body(builder, size), media_type="application/json")
            first = await unless_disconnected(http, first_updates(updates))
        except BaseException as error:
            self._engine.cancel(submission.updates)
            usage.engine_died = isinstance(error, Exception) and as_api_error(error).code == ENGINE_DIED
            raise
        return EventStream(
            response_events(first, updates, builder), on_end=lambda: self._engine.cancel(submission.updates)
        )

    async def _submit_more(self, request: GenerationRequest, submission: _Submission, http: HTTPRequest) -> None:
        """Submit further prompts of a request, once there is room for them."""
        left = len(submission.tokenized.prompts) - submission.num_submitted
        count = min(left, request.at_once or left)
        while True:
            try:
                tenant = _tenant(request.body, http)
                async with self._admission.reserve(count, request.params.num_sequences, tenant):
                    self._submit_prompts(submission, count, request.body, http)
                    return
            except APIError as error:
                if error.status_code != 429:
                    raise
            async with submission.deadline.enforced():
                await unless_disconnected(http, asyncio.sleep(RETRY_SECONDS))


def _tenant(body: EngineBody, http: HTTPRequest) -> str:
    # With keys, the `user` parameter must not change the tenant, which would give a client a larger share.
    return http.state.tenant or body.user or ""


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


T = TypeVar("T")


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
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


async def _disconnect(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
