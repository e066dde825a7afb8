"""The offline API: a list of prompts in, results in the same order out."""

from __future__ import annotations

import gc
import reprlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

from chairlift.config import EngineConfig
from chairlift.core.events import Event
from chairlift.core.sampling.params import Pooling, PoolingKind, SamplingParams
from chairlift.core.targets import NO_TARGETS
from chairlift.errors import EngineDead, InvalidParameter
from chairlift.lora import LoRARequest, lora_of_each
from chairlift.options import options_of, translate_options
from chairlift.outputs import (
    ChatFormat,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Messages,
    Prompt,
    PromptInput,
    RequestOutput,
    ResultCollector,
    ScoringOutput,
    ScoringRequestOutput,
    StreamedText,
    check_preset,
    conversations_of,
    params_of,
    parse_prompts,
)
from chairlift.text.relevance import make_pair_scoring, pair_up

if TYPE_CHECKING:
    from chairlift.engine.adapters import EngineAdapters
    from chairlift.engine.engine import Engine
    from chairlift.engine.memory_plan import MemoryPlan
    from chairlift.engine.startup import StartedEngine
    from chairlift.engine_keywords import EngineKeywords
    from chairlift.runner.base import ModelRunner
    from chairlift.text.tokenizer import Tokenizer
    from chairlift.vision.processor import ImageProcessor


class LLM:
    """A model in this process, ready to generate.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

    Options are those of `EngineConfig` (max_model_len, max_batch_tokens, kv_memory, …; see docs/options.md). vLLM's
    names for them (max_num_seqs, enable_prefix_caching, …) are accepted too.

    Calls without sampling parameters use those that the model recommends, or those of a `preset` (see the option
    `presets`); parameters that are given are used as they are. Conversations get the option `system_prompt`, or that
    of the preset, where they have none.

    `close`, or the end of a `with` block, frees the memory and the threads.
    """

    def __init__(
        self, model: str = "smollm2-135m", *, progress: bool = True, **options: Unpack[EngineKeywords]
    ) -> None:
        config = make_config(options)
        from chairlift.engine.settings import for_throughput  # imported late: torch takes seconds to import
        from chairlift.engine.startup import load_engine

        loaded = load_engine(model, for_throughput(config), progress=progress)
        self.model = model
        self.embedding = loaded.embedding
        self.defaults = loaded.defaults
        self._options = options
        self._loaded: StartedEngine | None = loaded
        # One for each call in flight; a stream may be open while generate() runs.
        self._batches: list[ResultCollector] = []
        self.engine.subscribe(partial(_add_events_to_all, self._batches))

    @property
    def engine(self) -> Engine:
        return self._open.engine

    @property
    def runner(self) -> ModelRunner:
        return self._open.runner

    @property
    def memory(self) -> MemoryPlan:
        return self._open.memory

    @property
    def _open(self) -> StartedEngine:
        if self._loaded is None:
            raise EngineDead(f"this LLM of {self.model!r} was closed; make another one")
        return self._loaded

    @property
    def _images(self) -> ImageProcessor | None:
        """What prepares images, if the model reads them."""
        return None if self._open.images is None else self._open.images.processor

    @property
    def default_sampling(self) -> Mapping[str, Any]:
        """The sampling parameters by name that calls without any use."""
        return self.defaults.sampling

    @property
    def chat_format(self) -> ChatFormat:
        """How conversations become prompts."""
        return ChatFormat(self.get_tokenizer(), self.engine.reasoning_format, self.defaults, self._images)

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_default_sampling_params(self, preset: str | None = None) -> SamplingParams:
        """The parameters of calls without any: SamplingParams() with what the model recommends, or a preset has."""
        return SamplingParams.with_defaults(self.defaults.preset(preset).sampling)

    def close(self) -> None:
        """Free the memory and end the threads; requests that are not finished end, and further calls raise EngineDead.

        A second call does nothing.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.engine.shut_down()
            del loaded
            free_memory_of_engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return described(self, self.model, self._options, None if self._loaded is None else capacity(self.engine))

    # ---- generating ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        preset: str | None = None,
        lora: Any = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and optionally
        "cache_salt", "priority" (lower is sooner), "targets" and "tenant". `use_tqdm` shows a progress bar. `timeout`
        (seconds) ends requests that are not finished by then. `preset` names the parameters to use. `lora` names the
        adapter, or is a mapping of adapters to weights; a list has one for each prompt, None for the base model.
        """
        from chairlift.progress import generation_progress

        inputs = self._with_lora(parse_prompts(prompts, self.get_tokenizer(), self._images), lora)
        with (
            self._submitted(inputs, self._params_of(inputs, sampling_params, preset), timeout) as batch,
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
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        preset: str | None = None,
        lora: Any = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role": …, "content": …}.

        With `continue_final_message`, the model continues the last message instead of beginning a new one. Without
        `sampling_params`, an answer may fill the context.
        """
        options = dict(chat_template_kwargs or {}, tools=tools, continue_final_message=continue_final_message)
        if add_generation_prompt is not None:
            options["add_generation_prompt"] = add_generation_prompt
        format_ = self.chat_format
        prompts = [
            format_.prompt(conversation, preset=preset, **options) for conversation in conversations_of(messages)
        ]
        given = params_of(prompts, sampling_params, format_.params(preset, chat=True))
        params = [format_.after_reasoning(prompt, each) for prompt, each in zip(prompts, given, strict=True)]
        return self.generate(prompts, params, use_tqdm=use_tqdm, timeout=timeout, lora=lora)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        preset: str | None = None,
        lora: Any = None,
    ) -> Iterator[StreamedText]:
        """Yield pieces of text as they are generated.

        Bad input raises at once. The requests are queued when the first piece is requested. Closing the iterator
        cancels those that are still running.
        """
        inputs = self._with_lora(parse_prompts(prompts, self.get_tokenizer(), self._images), lora)
        params = self._params_of(inputs, sampling_params, preset)
        for each in params:
            each.check_streamable()
        self._check(inputs, params, timeout)
        return self._stream(inputs, params, timeout)

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        preset: str | None = None,
        lora: Any = None,
    ) -> Iterator[StreamedText]:
        """`stream` for one conversation."""
        format_ = self.chat_format
        prompt = format_.prompt(messages, preset=preset)
        (params,) = params_of([prompt], sampling_params, format_.params(preset, chat=True))
        return self.stream(prompt, format_.after_reasoning(prompt, params), timeout=timeout, lora=lora)

    # ---- adapters -----------------------------------------------------------------------------------------------

    def load_lora(self, name: str, path: str) -> None:
        """Register an adapter, or replace the one of this name; requests that run go on with theirs."""
        self._adapters.load(name, path)

    def unload_lora(self, name: str) -> None:
        """Remove an adapter; requests that run go on with it."""
        self._adapters.pool.find(name)
        self._adapters.pool.unregister(name)

    @property
    def loras(self) -> list[str]:
        """The names of all adapters."""
        return [] if self.engine.adapters is None else self.engine.adapters.pool.names

    @property
    def _adapters(self) -> EngineAdapters:
        if self.engine.adapters is None:
            raise InvalidParameter("lora", "this engine has no adapters; start it with lora or max_loras")
        return self.engine.adapters

    def _with_lora(self, inputs: list[PromptInput], lora: Any) -> list[PromptInput]:
        """The prompts with their adapters; those of `LoRARequest`s are registered if they are not yet."""
        for prompt, each in zip(inputs, lora_of_each(lora, len(inputs)), strict=True):
            if each is not None:
                prompt.options = {**prompt.options, "lora": each}
            named = prompt.options.get("lora")
            if isinstance(named, LoRARequest):
                named.register(self._adapters)
        return inputs

    def _params_of(
        self, inputs: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None, preset: str | None
    ) -> list[SamplingParams]:
        check_preset(preset, params)
        return params_of(inputs, params, self.get_default_sampling_params(preset))

    # ---- prompts without answers --------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        timeout: float | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt.

        `pooling` is "mean", "last" or "cls" (the first token); by default what the checkpoint says, else the mean.
        `dimensions` keeps only the first ones, for models that were trained for that. `normalize` scales to length 1.
        `prompt_name`: texts begin with what the checkpoint has under this name.
        """
        self.embedding.require()
        params = embedding_params(self.embedding.kind, pooling, dimensions, normalize)
        prompts = self._with_prompt(prompts, prompt_name)
        results = self.generate(prompts, params, use_tqdm=use_tqdm, timeout=timeout)
        return [
            EmbeddingRequestOutput(result.request_id, result.prompt_token_ids, EmbeddingOutput(result.require_vector()))
            for result in results
        ]

    def _with_prompt(self, prompts: Prompt | Sequence[Prompt], name: str | None) -> Prompt | Sequence[Prompt]:
        """The texts behind a prompt of the checkpoint; what is no text has it already."""
        if isinstance(prompts, str):
            return self.embedding.prompted(prompts, name)
        if isinstance(prompts, Sequence) and all(isinstance(text, str) for text in prompts):
            return [self.embedding.prompted(str(text), name) for text in prompts]
        if name is not None:
            raise InvalidParameter("prompt_name", "only goes with texts")
        return prompts

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
        timeout: float | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well two texts go together: one with each of a list, or each with its counterpart.

        A reranker answers whether `text_2` is relevant for `text_1`, with its own `instruction` if given; for other
        models it is the cosine of the two embeddings.
        """
        self.embedding.require()
        tokenizer, pairs = self.get_tokenizer(), pair_up(text_1, text_2, ("text_1", "text_2"))
        known = self.embedding
        options: dict[str, Any] = {"labels": known.labels, "raw_scores": known.raw_scores}
        scoring = make_pair_scoring(tokenizer, known.kind, known.answers, instruction, **options)
        params = SamplingParams(max_tokens=0, pooling=scoring.pooling)
        results = self.generate(scoring.encode(tokenizer, pairs), params, use_tqdm=use_tqdm, timeout=timeout)
        scores = scoring.scores(pairs, [result.require_vector() for result in results])
        return [ScoringRequestOutput(ScoringOutput(score)) for score in scores]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int,
        max_tokens: int | None = 16,
        *,
        use_tqdm: bool = True,
        timeout: float | None = None,
        lora: Any = None,
        **params: Any,
    ) -> list[RequestOutput]:
        """The `beam_width` best continuations of every prompt, best first; `params` are those of SamplingParams."""
        search = SamplingParams(
            **{"n": beam_width, "temperature": 0.0, **params}, beam_width=beam_width, max_tokens=max_tokens
        )
        return self.generate(prompts, search, use_tqdm=use_tqdm, timeout=timeout, lora=lora)

    # ---- driving the engine -------------------------------------------------------------------------------------

    def _check(self, inputs: Sequence[PromptInput], params: Sequence[SamplingParams], timeout: float | None) -> None:
        for prompt, each in zip(inputs, params, strict=True):
            self.engine.check(
                prompt.token_ids,
                each,
                timeout,
                prompt.options.get("priority", 0),
                prompt.options.get("targets", NO_TARGETS),
                prompt.options.get("images", ()),
            )
            self.engine.find_adapters(prompt.options.get("lora"))
            if each.structure is not None:
                self.engine.compile(each.structure)  # raises before anything is queued

    @contextmanager
    def _submitted(
        self, inputs: Sequence[PromptInput], params: Sequence[SamplingParams], timeout: float | None
    ) -> Iterator[ResultCollector]:
        """Queue all prompts, or none if one is bad. On exit, requests that are not finished are cancelled."""
        self._check(inputs, params, timeout)
        batch = ResultCollector(self.get_tokenizer())
        self._batches.append(batch)
        try:
            for prompt, each in zip(inputs, params, strict=True):
                ids = self.engine.submit(prompt.token_ids, each, timeout=timeout, **prompt.options)
                batch.add(ids, prompt, each, self.engine.now())
            self.engine.expect_no_more()
            yield batch
        finally:
            self._batches.remove(batch)
            for request_id in batch.open_ids() if self._loaded is not None else ():
                self.engine.cancel(request_id)

    def _stream(
        self, inputs: Sequence[PromptInput], params: Sequence[SamplingParams], timeout: float | None
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


def make_config(options: Mapping[str, Any]) -> EngineConfig:
    own = translate_options(options, options_of(EngineConfig))
    if "dtype" in own:
        own["dtype"] = str(own["dtype"]).removeprefix("torch.")
    return EngineConfig(**own)


def free_memory_of_engine() -> None:
    """Free what a closed engine has left: its objects refer to each other, and torch keeps memory of GPUs."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def capacity(engine: Engine) -> str:
    return f"context of {engine.max_model_len} tokens, {engine.scheduler.max_batch_requests} requests per step"


def described(llm: object, model: str, options: Mapping[str, Any], capacity: str | None) -> str:
    """Return the `repr` of a model: how it was made, and what it can do unless it is closed."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    made = ", ".join([repr(model), *(f"{name}={short.repr(value)}" for name, value in options.items())])
    return f"<{type(llm).__name__}({made}): {capacity or 'closed'}>"


def _add_events_to_all(batches: Sequence[ResultCollector], events: Sequence[Event]) -> None:
    for batch in batches:
        batch.add_events(events)


def embedding_params(
    default: PoolingKind, pooling: str | None, dimensions: int | None, normalize: bool
) -> SamplingParams:
    """The parameters of a request for an embedding."""
    if pooling is not None and pooling not in [*PoolingKind]:
        raise InvalidParameter("pooling", f"must be {' or '.join(PoolingKind)}, got {pooling!r:.40}")
    kind = default if pooling is None else PoolingKind(pooling)
    return SamplingParams(max_tokens=0, pooling=Pooling(kind, dimensions, normalize))
