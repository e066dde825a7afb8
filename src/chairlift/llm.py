"""The offline API: a list of prompts in, results in the same order out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from chairlift.config import EngineConfig
from chairlift.core.events import (
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TextProduced,
    TokenProduced,
)
from chairlift.core.sampling.logprobs import TokenLogprobs
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.options.aliases import translate_options
from chairlift.options.declaration import options_of
from chairlift.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamedText

if TYPE_CHECKING:
    from chairlift.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_PROMPT_OPTIONS = ("cache_salt", "priority", "tenant")  # optional keys of a prompt


class LLM:
    """A model in this process, ready to generate.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

    Options are those of `EngineConfig` (max_model_len, max_batch_tokens, kv_memory, …; see docs/options.md). vLLM's
    names for them (max_num_seqs, enable_prefix_caching, …) are accepted too.
    """

    def __init__(self, model: str = "smollm2-135m", *, progress: bool = True, **options: Any) -> None:
        config = _make_config(options)
        from chairlift.engine.machine_defaults import for_throughput  # imported late: torch takes seconds to import
        from chairlift.engine.startup import load_engine

        loaded = load_engine(model, for_throughput(config), progress=progress)
        self.engine = loaded.engine
        self.runner = loaded.runner
        self.memory = loaded.memory
        self._batches: list[_Batch] = []  # one for each call in flight; a stream may be open while generate() runs
        self.engine.subscribe(partial(_add_events_to_all, self._batches))

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    # ---- generating ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and optionally
        "cache_salt", "priority" (lower is sooner) and "tenant". `use_tqdm` shows a progress bar. `timeout` (seconds)
        ends requests that are not finished by then.
        """
        from chairlift.progress import generation_progress

        inputs = self._parse_prompts(prompts)
        with (
            self._submitted(inputs, _params_of(inputs, sampling_params), timeout) as batch,
            generation_progress(batch.num_open, enabled=use_tqdm) as advance,
        ):
            while batch.num_open:
                self._step()
                advance(batch.num_open, batch.num_tokens)
        return batch.results

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": …, "content": …}."""
        conversations: list[Any] = [messages] if _is_conversation(messages) else list(messages)
        options = dict(chat_template_kwargs or {}, add_generation_prompt=add_generation_prompt, tools=tools)
        prompts = [self._render(conversation, options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, timeout=timeout)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
    ) -> Iterator[StreamedText]:
        """Yield pieces of text as they are generated.

        Bad input raises at once. The requests are queued when the first piece is requested. Closing the iterator
        cancels those that are still running.
        """
        inputs = self._parse_prompts(prompts)
        params = _params_of(inputs, sampling_params)
        for one in params:
            one.check_streamable()
        self._check(inputs, params, timeout)
        return self._stream(inputs, params, timeout)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Iterator[StreamedText]:
        """`stream` for one conversation."""
        return self.stream(self._render(messages, {}), sampling_params, timeout=timeout)

    def _render(self, conversation: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
        text, token_ids = self.get_tokenizer().encode_chat(conversation, **options)
        return {"prompt": text, "prompt_token_ids": token_ids}

    # ---- driving the engine -------------------------------------------------------------------------------------

    def _parse_prompts(self, prompts: Prompt | Sequence[Prompt]) -> list[_Input]:
        if not isinstance(prompts, (Sequence, Mapping)):
            raise InvalidParameter("prompts", f"must be a prompt or a list of them, got {type(prompts).__name__}")
        single = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], int))
        many: Sequence[Any] = [prompts] if single else prompts  # type: ignore[assignment]
        if not len(many):
            raise InvalidParameter("prompts", "is empty; give at least one prompt")
        return [_Input.parse(prompt, self.get_tokenizer()) for prompt in many]

    def _check(self, inputs: Sequence[_Input], params: Sequence[SamplingParams], timeout: float | None) -> None:
        for prompt, one in zip(inputs, params, strict=True):
            self.engine.check(prompt.token_ids, one, timeout, prompt.options.get("priority", 0))
            if one.structure is not None:
                self.engine.compile(one.structure)  # raises before anything is queued

    @contextmanager
    def _submitted(
        self, inputs: Sequence[_Input], params: Sequence[SamplingParams], timeout: float | None
    ) -> Iterator[_Batch]:
        """Queue all prompts, or none if one is bad. On exit, requests that are not finished are cancelled."""
        self._check(inputs, params, timeout)
        batch = _Batch(self.get_tokenizer())
        self._batches.append(batch)
        try:
            for prompt, one in zip(inputs, params, strict=True):
                ids = self.engine.submit(prompt.token_ids, one, timeout=timeout, **prompt.options)
                batch.add(ids, prompt, one, self.engine.now())
            self.engine.expect_no_more()
            yield batch
        finally:
            self._batches.remove(batch)
            for request_id in batch.open_ids():
                self.engine.cancel(request_id)

    def _stream(
        self, inputs: Sequence[_Input], params: Sequence[SamplingParams], timeout: float | None
    ) -> Iterator[StreamedText]:
        with self._submitted(inputs, params, timeout) as batch:
            while batch.num_open or batch.has_new_output:
                if not batch.has_new_output:  # another call may have stepped meanwhile
                    self._step()
                yield from batch.pieces()

    def _step(self) -> None:
        pause = self.engine.pause()
        if pause > 0:  # sleep(0) would still yield the core
            time.sleep(min(pause, 1.0))
        self.engine.step()  # a listener adds the events to every open batch
        self.engine.check_alive()


class _Input:
    """A prompt as token ids, with the options that came with it."""

    def __init__(self, text: str | None, token_ids: list[int], options: Mapping[str, Any]) -> None:
        self.text = text
        self.token_ids = token_ids
        self.options = options  # arguments of Engine.submit

    @classmethod
    def parse(cls, prompt: Any, tokenizer: Tokenizer) -> _Input:
        fields = dict(prompt) if isinstance(prompt, Mapping) else {}
        if isinstance(prompt, str):
            fields["prompt"] = prompt
        elif not isinstance(prompt, Mapping):
            fields["prompt_token_ids"] = prompt
        text, token_ids = fields.pop("prompt", None), fields.pop("prompt_token_ids", None)
        options = {name: fields.pop(name) for name in _PROMPT_OPTIONS if fields.get(name) is not None}
        if fields:
            known = ", ".join(("prompt", "prompt_token_ids", *_PROMPT_OPTIONS))
            raise InvalidParameter("prompt", f"unknown keys {sorted(fields)}; use {known}")
        for name in ("cache_salt", "tenant"):
            if not isinstance(options.get(name, ""), str):
                raise InvalidParameter(name, f"must be a string, got {type(options[name]).__name__}")
        if token_ids is None:
            if not isinstance(text, str):
                raise InvalidParameter("prompt", f"must be a string or token ids, got {type(text).__name__}")
            token_ids = tokenizer.encode(text)
        elif isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise InvalidParameter("prompt", f"token ids must be a list, got {type(token_ids).__name__}")
        return cls(text, list(token_ids), options)


class _Batch:
    """Collects the results of one call from the engine's events."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.results: list[RequestOutput] = []
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._places: dict[str, tuple[int, int]] = {}  # request id -> (prompt, completion)
        self._open: dict[str, None] = {}
        self._changed: dict[str, None] = {}  # requests with output since the last call of pieces()
        self._returned: dict[str, tuple[int, int]] = {}  # characters and tokens that pieces() has returned

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_new_output(self) -> bool:
        return bool(self._changed)

    def open_ids(self) -> list[str]:
        return list(self._open)

    def add(self, ids: Sequence[str], prompt: _Input, params: SamplingParams, now: float) -> None:
        with_logprobs = params.logprobs is not None
        completions = [
            CompletionOutput(
                index, logprobs=[] if with_logprobs else None, cumulative_logprob=0.0 if with_logprobs else None
            )
            for index in range(len(ids))
        ]
        for index, request_id in enumerate(ids):
            self._places[request_id] = (len(self.results), index)
            self._open[request_id] = None
        self.results.append(
            RequestOutput(ids[0], prompt.text, prompt.token_ids, completions, RequestMetrics(arrival=now))
        )

    def add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            request_id = getattr(event, "request_id", "")
            if request_id in self._open:
                prompt, index = self._places[request_id]
                self._apply(event, self.results[prompt], self.results[prompt].outputs[index])

    def _apply(self, event: Event, result: RequestOutput, completion: CompletionOutput) -> None:
        first = completion.index == 0  # a result has the metrics of its first completion
        match event:
            case RequestAdmitted() if first and result.metrics.boarded is None:
                result.metrics.boarded = event.time
                result.cached_tokens = event.cached_tokens
            case RequestPreempted():
                result.metrics.preemptions += 1
            case TokenProduced():
                self.num_tokens += 1
                self._changed[event.request_id] = None
                completion.token_ids.append(event.token)
                self._add_logprobs(completion, event.logprobs)
                if first:
                    result.metrics.token_times.append(event.time)
            case TextProduced():
                completion.text += event.text
            case RequestFinished():
                completion.finish_reason = event.ending.reason.value
                completion.stop_reason = event.ending.detail
                completion.score = event.score
                if event.logprob is not None:
                    completion.cumulative_logprob = event.logprob
                result.metrics.finished = event.time
                self._changed[event.request_id] = None
                del self._open[event.request_id]
            case _:
                pass

    def _add_logprobs(self, completion: CompletionOutput, found: TokenLogprobs | None) -> None:
        if found is None or completion.logprobs is None or completion.cumulative_logprob is None:
            return
        entries = {token: (value, rank) for rank, (token, value) in enumerate(found.top, start=1)}
        entries[found.token_id] = (found.logprob, found.rank)
        completion.cumulative_logprob += found.logprob
        completion.logprobs.append(
            {
                token: Logprob(value, rank, self._tokenizer.decode([token], skip_special_tokens=False))
                for token, (value, rank) in entries.items()
            }
        )

    def pieces(self) -> list[StreamedText]:
        """Return the output since the last call: one piece for each completion with new output."""
        changed, self._changed = self._changed, {}
        return [self._piece(request_id) for request_id in changed]

    def _piece(self, request_id: str) -> StreamedText:
        prompt, index = self._places[request_id]
        completion = self.results[prompt].outputs[index]
        characters, tokens = self._returned.get(request_id, (0, 0))
        self._returned[request_id] = len(completion.text), len(completion.token_ids)
        text, token_ids = completion.text[characters:], completion.token_ids[tokens:]
        return StreamedText(prompt, index, text, token_ids, completion.finish_reason)


def _make_config(options: Mapping[str, Any]) -> EngineConfig:
    own = translate_options(options, options_of(EngineConfig))
    if "dtype" in own:
        own["dtype"] = str(own["dtype"]).removeprefix("torch.")
    return EngineConfig(**own)


def _add_events_to_all(batches: Sequence[_Batch], events: Sequence[Event]) -> None:
    for batch in batches:
        batch.add_events(events)


def _params_of(
    inputs: Sequence[_Input], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(inputs)
    if len(params) != len(inputs):
        raise InvalidParameter("sampling_params", f"{len(params)} given for {len(inputs)} prompts; give one or as many")
    for one in params:
        if not isinstance(one, SamplingParams):
            raise InvalidParameter("sampling_params", f"must be SamplingParams, got {type(one).__name__}")
    return list(params)


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)
