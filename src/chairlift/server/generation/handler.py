"""The path of every generation request, from value to value.

An endpoint has parsed the body (`GenerationRequest`). The request is admitted, which reserves capacity before any work
is done for it. Its prompts are tokenized in a thread and submitted to the engine, whose updates become the reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from chairlift.core.events import completion_ids
from chairlift.core.request import RequestLimits
from chairlift.core.targets import NO_TARGETS, Targets
from chairlift.errors import InvalidParameter
from chairlift.server.generation.admission import Admission
from chairlift.server.generation.endpoint import EngineBody, GenerationRequest, Tokenized
from chairlift.server.generation.reply import EventStream, collect, encoded_body, first_updates, response_events
from chairlift.server.generation.tokenizer_pool import TokenizerPool
from chairlift.server.generation.usage import RequestTexts, StreamMetrics, Usage
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EnginePort
from chairlift.server.process.streams import UpdateStream
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.classes import CLASS_HEADER, DEFAULT_CLASS, OWN_TARGETS, ServiceClasses
from chairlift.server.wire.errors import ENGINE_DIED, APIError, as_api_error, timed_out
from chairlift.server.wire.limits import Limits
from chairlift.server.wire.messages import Submit

DEFAULT_TAG = ":latest"
RETRY_SECONDS = 0.05  # The rest of a request is submitted again after this while the queue is full.


@dataclass(frozen=True, slots=True)
class Parsed:
    """A request as its endpoint has read it, and what counts for its sender."""

    request: GenerationRequest
    http: HTTPRequest
    tenant: str
    cache_salt: str  # requests with equal salts share cached prefixes
    num_sequences: int  # Each prompt has as many.
    timeout: float | None
    targets: Targets
    service_class: str  # empty without a class, and with targets of its own


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request for which capacity is reserved until its first prompts are submitted."""

    parsed: Parsed
    num_prompts: int  # This many are submitted at first.
    limits: RequestLimits
    deadline: float | None  # A time of the monotonic clock.


@dataclass(slots=True)
class Submitted:
    """A request whose prompts are submitted, at least the first of them."""

    admitted: Admitted
    tokenized: Tokenized
    response_id: str
    updates: UpdateStream  # Those of the prompts that were submitted last.
    num_left: int  # prompts that are not submitted yet


@dataclass(eq=False)
class GenerationHandler:
    model: ServedModel
    engine: EnginePort
    metrics: Metrics
    limits: Limits
    admission: Admission
    isolate_keys: bool = field(default=False, kw_only=True)  # whether only administrators see what concerns all keys
    classes: ServiceClasses = field(default_factory=ServiceClasses, kw_only=True)

    def __post_init__(self) -> None:
        self.tokenizer_pool = TokenizerPool(self.limits.tenant_weights)
        self.texts = RequestTexts(self.model.tokenizer)  # Open dashboard pages show them.

    async def handle(self, request: GenerationRequest, http: HTTPRequest) -> Response:
        check_model_name(self.model, request.body.model)
        request.model = self.model.named(request.body.model)
        try:
            parsed = self._parsed(request, http)
            async with self._admit(parsed) as admitted:
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
        if self.isolate_keys and key is not None:
            salt = hashlib.sha256(key + salt.encode("utf-8", "surrogatepass")).hexdigest()
        timeout = self.limits.default_timeout if body.timeout is None else body.timeout
        targets = self._targets(body, http)
        return Parsed(request, http, tenant, salt, request.params.num_sequences, timeout, *targets)

    def _targets(self, body: EngineBody, http: HTTPRequest) -> tuple[Targets, str]:
        """The targets of a request, and the name of the class that has them."""
        key_class = None if http.state.api_key is None else http.state.api_key.service_class or None
        # A background response has no headers of its own; its state has the class that its request named in one.
        header = http.headers.get(CLASS_HEADER, http.scope["state"].get("class"))
        names, chosen = (header, body.service_tier, key_class), None
        if self.classes.by_name or any(name is not None for name in names):
            chosen = self.classes.choose(*names)
            body.service_tier = chosen.name if chosen else DEFAULT_CLASS
        if body.targets is not None:
            return body.targets.targets, ""
        return (chosen.targets, chosen.name) if chosen else (NO_TARGETS, "")

    @asynccontextmanager
    async def _admit(self, parsed: Parsed) -> AsyncIterator[Admitted]:
        """Reserve capacity for the body of the `async with`. A refused request must cost no work."""
        request, state, timeout = parsed.request, parsed.http.state, parsed.timeout
        count = min(request.num_prompts, request.at_once or request.num_prompts)
        await state.parsing.aclose()  # What parsing had reserved; no other task runs before the rest is.
        async with self.admission.reserve(count, parsed.num_sequences, parsed.tenant) as loaded:
            if timeout is not None and not timeout > 0:
                raise InvalidParameter("timeout", f"must be a number of seconds above 0, got {timeout!r}")
            deadline = None if timeout is None else state.arrived + timeout
            yield Admitted(parsed, count, loaded.limits, deadline)

    async def _tokenize(self, admitted: Admitted) -> Tokenized:
        request, body = admitted.parsed.request, await admitted.parsed.http.body()
        size, images = len(body) + request.more_text, self.model.may_read_images(body)
        async with _until(admitted.deadline):
            work = partial(request.tokenize, admitted.limits.max_model_len)
            tokenized = await self.tokenizer_pool.run(admitted.parsed.tenant, size, work, images=images)
        # The engine checks this too, but here a prompt that is too long does not reach its loop.
        longest, prompt_only = max(map(len, tokenized.prompts)), tokenized.params.max_tokens == 0
        admitted.limits.check_lengths(longest, request.max_tokens, request.prompt_parameter, prompt_only=prompt_only)
        return tokenized

    async def _submit(self, admitted: Admitted, tokenized: Tokenized) -> Submitted:
        request, allowance = admitted.parsed.request, admitted.parsed.http.state.allowance
        if allowance is not None:
            output = (tokenized.params.max_tokens or 0) * admitted.parsed.num_sequences
            await allowance.charge(sum(len(prompt) + output for prompt in tokenized.prompts))
        response_id = f"{request.id_prefix}{uuid.uuid4().hex}"
        updates = self._submit_prompts(admitted, tokenized, response_id, 0, admitted.num_prompts)
        return Submitted(admitted, tokenized, response_id, updates, len(tokenized.prompts) - admitted.num_prompts)

    def _submit_prompts(
        self, admitted: Admitted, tokenized: Tokenized, response_id: str, first: int, count: int
    ) -> UpdateStream:
        """Submit `count` prompts, beginning with the prompt `first`."""
        parsed, params = admitted.parsed, tokenized.params
        messages = [
            Submit(
                request_id=f"{response_id}-{index}",
                prompt=prompt,
                params=params,
                timeout=_seconds_left(admitted.deadline),
                cache_salt=parsed.cache_salt,
                priority=parsed.request.body.priority or 0,
                tenant=parsed.tenant,
                targets=parsed.targets,
                service_class=parsed.service_class,
                images=tokenized.images,
                lora=parsed.request.body.lora_weights(self.model),
            )
            for index, prompt in enumerate(tokenized.prompts[first : first + count], first)
        ]
        state, texts = parsed.http.state, self.texts if self.texts.is_watched else None
        if (traffic := parsed.http.scope["state"].get("traffic")) is not None:
            traffic.add(messages)
        for message in messages:
            self.metrics.request_prompt_tokens.observe(len(message.prompt))
        expected = parsed.targets, parsed.service_class or OWN_TARGETS
        observer = StreamMetrics(self.metrics, state.arrived, state.timelines, texts, *expected)
        updates = self.engine.submit(messages, observer)
        if texts is not None:
            for message in messages:
                texts.open(completion_ids(message.request_id, params.n), message.prompt, state.key)
        return updates

    async def _reply(self, submitted: Submitted) -> Response:
        parsed, tokenized, response_id = submitted.admitted.parsed, submitted.tokenized, submitted.response_id
        new_tracker = None if tokenized.reasoning is None else tokenized.reasoning.tracker
        usage = parsed.http.state.usage = Usage(sum(map(len, tokenized.prompts)), new_tracker=new_tracker)
        try:
            self.metrics.prompt_tokens.inc(usage.prompt_tokens)
            prompt_ids = [f"{response_id}-{index}" for index in range(len(tokenized.prompts))]
            ids = [each for prompt_id in prompt_ids for each in completion_ids(prompt_id, tokenized.params.n)]
            builder = tokenized.reply(response_id, ids, usage)
            updates = aiter(submitted.updates)
            if not parsed.request.streams:
                size = await collect(updates, builder)
                while submitted.num_left:
                    await self._submit_more(submitted)
                    size += await collect(aiter(submitted.updates), builder)
                await parsed.request.finish(builder)
                return Response(await encoded_body(builder, size), media_type="application/json")
            first = await first_updates(updates)
        except BaseException as error:
            self.engine.cancel(submitted.updates)
            usage.engine_died = isinstance(error, Exception) and as_api_error(error).code == ENGINE_DIED
            raise
        request_id, finish = parsed.http.state.request_id, partial(parsed.request.finish, builder)
        events = response_events(first, updates, builder, request_id, self.limits.ping_seconds, finish)
        return EventStream(events, lambda: self.engine.cancel(submitted.updates), builder.media_type)

    async def _submit_more(self, submitted: Submitted) -> None:
        """Submit further prompts of a request, once there is room for them."""
        admitted, tokenized = submitted.admitted, submitted.tokenized
        parsed, first = admitted.parsed, len(tokenized.prompts) - submitted.num_left
        count = min(submitted.num_left, admitted.num_prompts)
        while True:
            try:
                async with self.admission.reserve(count, parsed.num_sequences, parsed.tenant):
                    submitted.updates = self._submit_prompts(admitted, tokenized, submitted.response_id, first, count)
                    submitted.num_left -= count
                    return
            except APIError as error:
                if error.status_code != 429:
                    raise
            async with _until(admitted.deadline):
                await asyncio.sleep(RETRY_SECONDS)


def check_model_name(model: ServedModel, name: str | None) -> None:
    """Raise a 404 error if a request names another model. Ollama's clients name the tag of a model without one, too."""
    if name is not None and name.removesuffix(DEFAULT_TAG) not in model.names and name not in model.all_names:
        known = ", ".join(map(repr, model.all_names))
        problem = f"the model {name[:200]!r} does not exist; this server has {known}"
        raise APIError(404, problem, param="model", code="model_not_found")


def _seconds_left(deadline: float | None) -> float | None:
    """Return the seconds left; raises a 408 error once the deadline has passed."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise timed_out()
    return left


@asynccontextmanager
async def _until(deadline: float | None) -> AsyncIterator[None]:
    """Cancel the body of the `async with` and raise a 408 error when the deadline passes."""
    try:
        async with asyncio.timeout(_seconds_left(deadline)):
            yield
    except TimeoutError:
        raise timed_out() from None
