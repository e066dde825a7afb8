"""The path of every generation request: admit, tokenize, submit, respond."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from chairlift.core.request import completion_ids
from chairlift.errors import InvalidParameter
from chairlift.server.dashboard.subscribers import Subscribers
from chairlift.server.generation.admission import Admission
from chairlift.server.generation.deadline import Deadline
from chairlift.server.generation.endpoint import GenerationRequest, TokenizedPrompts
from chairlift.server.generation.stream_metrics import StreamMetrics
from chairlift.server.generation.tokenizer_pool import TokenizerPool
from chairlift.server.generation.usage import Usage
from chairlift.server.http.disconnect import unless_disconnected
from chairlift.server.http.sse import EventStream, collect, first_updates, response_events
from chairlift.server.metrics import Metrics
from chairlift.server.openai.types import GenerationBody
from chairlift.server.process.engine_port import EnginePort
from chairlift.server.process.messages import Submit
from chairlift.server.process.stream import UpdateStream
from chairlift.server.served_model import ServedModel
from chairlift.text.reasoning.reasoning_use import ReasoningUse

_json = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class _Submission:
    response_id: str
    num_prompt_tokens: int
    updates: UpdateStream
    reasoning: ReasoningUse | None


class GenerationHandler:
    def __init__(
        self,
        model: ServedModel,
        engine: EnginePort,
        admission: Admission,
        tokenizer_pool: TokenizerPool,
        metrics: Metrics,
        subscribers: Subscribers,
        *,
        default_timeout: float | None,
        isolate_keys: bool,
    ) -> None:
        self._model = model
        self._engine = engine
        self._admission = admission
        self._tokenizer_pool = tokenizer_pool
        self._metrics = metrics
        self._subscribers = subscribers
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
        async with self._admission.reserve(request.num_prompts, request.params.num_sequences) as loaded:
            timeout = self._default_timeout if request.body.timeout is None else request.body.timeout
            deadline = Deadline(http.state.arrived, timeout)
            tokenize = partial(request.tokenize, loaded.limits.max_model_len)
            async with deadline.enforced():
                work = self._tokenizer_pool.run(len(await http.body()), tokenize)
                tokenized = await unless_disconnected(http, work)
            # The engine checks this too, but here a prompt that is too long does not reach its loop.
            loaded.limits.check_prompt_length(
                max(map(len, tokenized.prompts)),
                request.prompt_parameter,
                prompt_only=tokenized.params.max_tokens == 0,
            )

            if http.state.allowance is not None:
                await http.state.allowance.charge(_most_tokens(tokenized))

            response_id = f"{request.id_prefix}{uuid.uuid4().hex}"
            messages = self._messages(response_id, tokenized, request.body, deadline, http)
            texts = self._subscribers.texts if self._subscribers.watching else None
            updates = self._engine.submit(messages, StreamMetrics(self._metrics, http.state.arrived, texts))
            for message in messages if texts is not None else ():
                ids = completion_ids(message.request_id, message.params.n)
                self._subscribers.texts.open(ids, message.prompt, http.state.key)
        return _Submission(response_id, sum(map(len, tokenized.prompts)), updates, tokenized.reasoning)

    def _messages(
        self, response_id: str, tokenized: TokenizedPrompts, body: GenerationBody, deadline: Deadline, http: HTTPRequest
    ) -> list[Submit]:
        return [
            Submit(
                request_id=f"{response_id}-{index}",
                prompt=prompt,
                params=tokenized.params,
                timeout=deadline.seconds_left(),
                cache_salt=self._cache_salt(body, http),
                priority=body.priority or 0,
                # With keys, the `user` parameter must not change the tenant, which would give a client a larger share.
                tenant=http.state.tenant or body.user or "",
            )
            for index, prompt in enumerate(tokenized.prompts)
        ]

    def _cache_salt(self, body: GenerationBody, http: HTTPRequest) -> str:
        """Return the cache salt: requests with equal salts share cached prefixes. With isolated keys it contains the
        key."""
        given, key = body.cache_salt or "", http.state.key
        if not self._isolate_keys or key is None:
            return given
        return hashlib.sha256(key + given.encode("utf-8", "surrogatepass")).hexdigest()

    async def _respond(self, request: GenerationRequest, submission: _Submission, http: HTTPRequest) -> Response:
        try:
            new_tracker = None if submission.reasoning is None else submission.reasoning.tracker
            usage = http.state.usage = Usage(submission.num_prompt_tokens, new_tracker=new_tracker)
            self._metrics.prompt_tokens.inc(usage.prompt_tokens)
            builder = request.response_builder(submission.response_id, submission.updates.ids, usage)
            updates = aiter(submission.updates)
            if not request.body.stream:
                await unless_disconnected(http, collect(updates, builder))
                return Response(_json.encode(builder.body()), media_type="application/json")
            first = await unless_disconnected(http, first_updates(updates))
        except BaseException:
            self._engine.cancel(submission.updates)
            raise
        return EventStream(
            response_events(first, updates, builder), on_end=lambda: self._engine.cancel(submission.updates)
        )


def _most_tokens(tokenized: TokenizedPrompts) -> int:
    """Return the tokens that a request may use, as far as its client limits them."""
    output = (tokenized.params.max_tokens or 0) * tokenized.params.num_sequences
    return sum(len(prompt) + output for prompt in tokenized.prompts)
