"""Between HTTP and the engine: admission, tokenising, streams, and the clock on every request."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import chairlift
from chairlift.core.request import completion_ids
from chairlift.core.sampling_params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.dashboard.request_texts import RequestTexts
from chairlift.server.dashboard.subscribers import Subscribers
from chairlift.server.generation.admission import Admission, check_lengths
from chairlift.server.generation.deadline import Deadline
from chairlift.server.generation.request_metrics import RequestMetrics
from chairlift.server.generation.tokenizer_pool import TokenizerPool
from chairlift.server.http.errors import APIError
from chairlift.server.http.sse import EventStream, collect, events, first_of, unless_disconnected
from chairlift.server.limits import Limits
from chairlift.server.metrics import Metrics
from chairlift.server.openai.response_builder import Answer, ChatShape, Reply, Shape, TextShape, Usage, json_encoder
from chairlift.server.openai.tool_responses import ToolShape
from chairlift.server.openai.types import ChatRequest, Completing, CompletionRequest, Sampling
from chairlift.server.process.engine_client import EngineClient
from chairlift.server.process.messages import Submit
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tool_formats.base import choose_format
from chairlift.text.tools.tool_use import ToolUse

# Words an answer, given its id, those of its completions, and where its tokens are counted.
Wording = Callable[[str, list[str], Usage], Answer]


@dataclass(frozen=True, slots=True)
class Prepared:
    prompts: list[list[int]]
    params: SamplingParams
    wording: Wording


@dataclass(frozen=True, slots=True)
class Job:
    """What an endpoint wants to have generated."""

    n: int  # completions that are generated for each prompt
    num_prompts: int
    prepare: Callable[[int], Prepared]  # tokenises, given max_model_len; runs in a thread
    parameter: str  # what the client calls its prompt
    id_prefix: str


class Service:
    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        engine: EngineClient,
        metrics: Metrics,
        limits: Limits,
        tool_format: str | None = None,
        *,
        isolate_keys: bool = False,
        policy_switch: bool = False,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.tool_format = choose_format(tokenizer.chat_template or "", tool_format)
        self.engine = engine
        self.metrics = metrics
        self.limits = limits
        self.admission = Admission(engine, metrics, limits)
        self.text = TokenizerPool()
        self._isolate_keys = isolate_keys
        self.created = int(time.time())
        self.policy_switch = policy_switch  # whether clients may change the policy of the running engine
        texts = RequestTexts(tokenizer)
        self.viewers = Subscribers(engine, metrics, texts, greeting=self._greeting, isolate_keys=isolate_keys)

    def _greeting(self) -> dict[str, Any]:
        loaded = self.engine.loaded
        return {
            "model": self.model_name,
            "version": chairlift.__version__,
            "has_chat": self.tokenizer.chat_template is not None,
            "policy_switch": self.policy_switch,
            "max_model_len": loaded.max_model_len if loaded else None,
        }

    # ---- the two endpoints ---------------------------------------------------------------------------------------

    async def complete(self, body: CompletionRequest, http: HTTPRequest) -> Response:
        params, texts = body.params(), body.prompts()

        def prepare(limit: int) -> Prepared:
            prompts = [self._encode(text, limit) for text in texts]
            echoes = [self._echo(text) if body.echo else "" for text in texts for _ in range(params.n)]
            wording = self._wording(TextShape(body.logprobs is not None, echoes), body)
            return Prepared(prompts, params, wording)

        return await self.answer(body, http, Job(params.num_sequences, len(texts), prepare, "prompt", "cmpl-"))

    async def chat(self, body: ChatRequest, http: HTTPRequest) -> Response:
        params = body.params()

        def prepare(limit: int) -> Prepared:
            use = self.tool_use(body)
            prompt = self.encode_chat(body, use, limit)
            shape = ToolShape(bool(body.logprobs), use) if use.tools else ChatShape(bool(body.logprobs))
            return Prepared([prompt], use.applied_to(params, self.tokenizer), self._wording(shape, body))

        return await self.answer(body, http, Job(params.num_sequences, 1, prepare, "messages", "chatcmpl-"))

    def tool_use(self, body: ChatRequest) -> ToolUse:
        return ToolUse.of(self.tool_format, body.tools, body.tool_choice, body.parallel_tool_calls)

    def _wording(self, shape: Shape, body: Completing) -> Wording:
        return partial(
            Reply,
            shape,
            self.model_name,
            self.tokenizer,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )

    def encode_chat(self, body: ChatRequest, use: ToolUse, limit: int) -> list[int]:
        options: dict[str, Any] = dict(body.chat_template_kwargs or {})
        for reserved in ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "max_tokens"):
            if reserved in options:
                raise InvalidParameter("chat_template_kwargs", f"{reserved!r} cannot be set there")
        if body.add_generation_prompt is not None:
            options["add_generation_prompt"] = body.add_generation_prompt
        return use.encode(self.tokenizer, body.messages, max_tokens=limit, **options)

    def _encode(self, text: str | list[int], limit: int) -> list[int]:
        if not isinstance(text, str):
            return check_token_ids("prompt", text)
        return self.tokenizer.encode(text, max_tokens=limit)

    def _echo(self, text: str | list[int]) -> str:
        return text if isinstance(text, str) else self.tokenizer.decode(text)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            problem = f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}"
            raise APIError(404, problem, param="model", code="model_not_found")

    def _salt(self, http: HTTPRequest, body: Sampling) -> str:
        """Whose cached prefixes this request may share: those with the same salt, and, if keys are isolated, the same
        API key."""
        given, key = body.cache_salt or "", http.state.key
        if not self._isolate_keys or key is None:
            return given
        return hashlib.sha256(key + given.encode("utf-8", "surrogatepass")).hexdigest()

    async def answer(self, body: Sampling, http: HTTPRequest, job: Job) -> Response:
        """The way of every generation: checked and admitted first, so that no work is done for those turned away."""
        self.check_model(body.model)
        with self.admission.places(job.num_prompts, job.n) as loaded:
            size = len(await http.body())
            prepare = partial(job.prepare, loaded.max_model_len)
            timeout = self.limits.default_timeout if body.timeout is None else body.timeout
            deadline = Deadline(http.state.arrived, timeout)
            async with deadline.watched():
                prepared = await unless_disconnected(http, self.text.run(size, prepare))
            check_lengths(job.parameter, prepared.prompts, loaded.max_model_len)
            answer_id = f"{job.id_prefix}{uuid.uuid4().hex}"
            requests = [
                Submit(
                    request_id=f"{answer_id}-{index}",
                    prompt=prompt,
                    params=prepared.params,
                    timeout=deadline.seconds_left(),
                    cache_salt=self._salt(http, body),
                    priority=body.priority or 0,
                    # Who has a key of his own cannot get a larger share by calling himself otherwise.
                    tenant=http.state.tenant or body.user or "",
                )
                for index, prompt in enumerate(prepared.prompts)
            ]
            texts = self.viewers.texts if self.viewers.watching else None
            stream = self.engine.submit(requests, RequestMetrics(self.metrics, http.state.arrived, texts))
            for request in requests if texts is not None else ():
                ids = completion_ids(request.request_id, request.params.n)
                self.viewers.texts.open(ids, request.prompt, http.state.key)
        try:
            usage = Usage(prompt_tokens=sum(map(len, prepared.prompts)))
            self.metrics.prompt_tokens.inc(usage.prompt_tokens)
            answer, updates = prepared.wording(answer_id, stream.ids, usage), aiter(stream)
            if not body.stream:
                await unless_disconnected(http, collect(updates, answer))
                return Response(json_encoder.encode(answer.body()), media_type="application/json")
            first = await unless_disconnected(http, first_of(updates))
        except BaseException:
            self.engine.cancel(stream)
            raise
        return EventStream(events(first, updates, answer), on_end=lambda: self.engine.cancel(stream))


def check_token_ids(parameter: str, tokens: list[int]) -> list[int]:
    """Refuse numbers that no message can carry; whether the vocabulary has them is the engine's to say."""
    for token in tokens:
        if not 0 <= token < 2**31:
            raise InvalidParameter(parameter, f"token id {str(token)[:40]} is out of range")
    return tokens
