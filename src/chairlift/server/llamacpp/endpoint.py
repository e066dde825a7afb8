"""POST /completion, /infill and /embedding of llama.cpp's server."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from chairlift.core.plan import TokenLogprobs
from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import (
    GenerationRequest,
    ResponseBuilder,
    Tokenized,
    parse_at,
    renamed_parameter,
)
from chairlift.server.generation.usage import Timeline, Usage
from chairlift.server.llamacpp.errors import llamacpp_error
from chairlift.server.llamacpp.sampling import NAMES
from chairlift.server.llamacpp.types import (
    InfillRequest,
    LlamaBody,
    LlamaCompletionRequest,
    LlamaEmbeddingRequest,
    PromptPart,
)
from chairlift.server.openai.pooling import EmbeddingGeneration, EmbeddingRequest
from chairlift.server.openai.response_builder import token_text
from chairlift.server.openai.types import check_unicode
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError
from chairlift.server.wire.messages import Update
from chairlift.text.fill_in_middle import encode_fill_in_middle
from chairlift.text.tokenizer import Tokenizer

_MAX_NORM = 2  # the Euclidean norm among llama.cpp's numbers

_encode = msgspec.json.Encoder().encode


class LlamaGeneration(GenerationRequest):
    """A request for completions of one or several prompts."""

    id_prefix = "cmpl-"

    body: LlamaBody

    def __init__(
        self, body: LlamaBody, model: ServedModel, timelines: Mapping[str, Timeline], *, num_prompts: int, is_list: bool
    ) -> None:
        try:
            params = body.params(model)
        except InvalidParameter as error:
            raise self.rename_error(error) from None
        self._timelines = timelines
        self._is_list = is_list or params.n > 1
        super().__init__(body, model, params, streams=bool(body.stream), num_prompts=num_prompts)

    @staticmethod
    def names() -> dict[str, str]:
        """Return this endpoint's names, by patterns of ours."""
        return NAMES

    def encode(self, max_tokens: int) -> list[list[int]]:
        raise NotImplementedError

    def tokenize(self, max_tokens: int) -> Tokenized:
        """Tokenize the prompts. Without a limit on the output, and with one that is too large, it may fill the
        context."""
        prompts, params = self.encode(max_tokens), self.params
        room = max(max_tokens - max(map(len, prompts), default=0), 1)
        if params.max_tokens is not None:
            params = params.clone(max_tokens=min(params.max_tokens, room))
        fields = self.body.response_fields
        texts = [""] * len(prompts)
        if fields is None or "prompt" in fields:
            texts = [self.model.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
        return Tokenized(prompts, params, partial(self._reply, max_tokens, params, prompts, texts))

    def _reply(
        self,
        context: int,
        params: SamplingParams,
        prompts: list[list[int]],
        texts: list[str],
        response_id: str,
        completion_ids: list[str],
        usage: Usage,
    ) -> LlamaBuilder:
        choices = {}
        for index, one in enumerate(completion_ids):
            which = index // params.n
            choices[one] = _Completion(index, texts[which], len(prompts[which]))
        return LlamaBuilder(self, choices, usage, params, context, self._timelines, is_list=self._is_list)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return error.renamed(renamed_parameter(error.parameter, self.names()))


class LlamaCompletionGeneration(LlamaGeneration):
    body: LlamaCompletionRequest

    def __init__(self, body: LlamaCompletionRequest, model: ServedModel, timelines: Mapping[str, Timeline]) -> None:
        self._prompts = body.prompts()
        super().__init__(body, model, timelines, num_prompts=len(self._prompts), is_list=body.is_list)

    def encode(self, max_tokens: int) -> list[list[int]]:
        return [encode_parts(self.model.tokenizer, one, max_tokens) for one in self._prompts]


class InfillGeneration(LlamaGeneration):
    body: InfillRequest

    def __init__(self, body: InfillRequest, model: ServedModel, timelines: Mapping[str, Timeline]) -> None:
        for name, text in body.texts():
            check_unicode(name, [text])
        super().__init__(body, model, timelines, num_prompts=1, is_list=False)

    @staticmethod
    def names() -> dict[str, str]:
        return NAMES | {"suffix": "input_suffix", "prompt": "input_prefix"}

    def encode(self, max_tokens: int) -> list[list[int]]:
        body = self.body
        extra = [(one.filename or "", one.text) for one in body.input_extra or ()]
        tokens = encode_fill_in_middle(
            self.model.tokenizer,
            body.input_prefix + body.prompt,
            body.input_suffix,
            max_tokens=max_tokens - 1 - min(body.limit or 0, max_tokens // 2),
            extra=extra,
        )
        return [tokens]


def encode_parts(tokenizer: Tokenizer, prompt: PromptPart, max_tokens: int) -> list[int]:
    """Encode a text, or a list of tokens and texts, of which only a first text begins as a prompt does."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, max_tokens=max_tokens)
    tokens: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, int):
            tokens.append(part)
        else:
            tokens += tokenizer.encode(part, add_special_tokens=index == 0, max_tokens=max_tokens)
    return tokens


# ---- responses -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Completion:
    """One completion, as far as it was generated."""

    index: int
    prompt: str
    num_prompt: int
    cached: int = 0
    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, update: Update) -> None:
        self.parts.append(update.text)
        self.tokens += update.tokens
        self.logprobs += update.logprobs
        self.cached = self.cached if update.cached_tokens is None else update.cached_tokens
        self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason

    @property
    def stop_type(self) -> str:
        if self.finish_reason is None:
            return "none"
        if self.finish_reason == "length":
            return "limit"
        return "word" if isinstance(self.stop_reason, str) else "eos"


class LlamaBuilder(ResponseBuilder):
    """Builds the response to /completion or /infill."""

    def __init__(
        self,
        request: LlamaGeneration,
        completions: dict[str, _Completion],
        usage: Usage,
        params: SamplingParams,
        context: int,
        timelines: Mapping[str, Timeline],
        *,
        is_list: bool,
    ) -> None:
        self.usage = usage
        self._body = request.body
        self._model = request.model
        self._completions = completions
        self._params = params
        self._context = context
        self._timelines = timelines
        self._is_list = is_list

    def add(self, update: Update) -> None:
        self._completions[update.request_id].add(update)

    def body(self) -> Any:
        shown = [self._whole(one_id, one) for one_id, one in self._completions.items()]
        return shown if self._is_list else shown[0]

    def events(self, update: Update) -> list[bytes]:
        one = self._completions[update.request_id]
        one.add(update)
        one.logprobs = []  # They are streamed with their tokens.
        events = []
        if update.text or update.tokens:
            event: dict[str, Any] = {
                "index": one.index,
                "content": update.text,
                "tokens": update.tokens,
                "id_slot": -1,
                "tokens_predicted": len(one.tokens),
                "tokens_evaluated": one.num_prompt,
            }
            if self._body.timings_per_token:
                event["timings"] = self._timings(update.request_id, one)
            if update.logprobs:
                event["completion_probabilities"] = self._probabilities(update.logprobs)
            events.append(_event(event | {"stop": False}))  # It is the last field, by which proxies know the end.
        if update.finish_reason is not None:
            end = self._whole(update.request_id, one)
            # Clients join the contents of all events, so the last one has none.
            empty: dict[str, Any] = {"content": "", "tokens": []}
            events.append(_event(end | {name: value for name, value in empty.items() if name in end}))
        return events

    def end_events(self) -> list[bytes]:
        return []

    def error_events(self, error: APIError) -> list[bytes]:
        return [_event(llamacpp_error(error.status_code, error.body, ""))]

    def _whole(self, one_id: str, one: _Completion) -> dict[str, Any]:
        text = "".join(one.parts)
        is_word = one.stop_type == "word"
        found: dict[str, Any] = {
            "index": one.index,
            "content": text,
            "tokens": one.tokens if self._body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self._body.model or self._model.name,
            "tokens_predicted": len(one.tokens),
            "tokens_evaluated": one.num_prompt,
            "generation_settings": generation_settings(self._params, self._context)
            | {"model": self._model.name, "stream": bool(self._body.stream)},
            "prompt": one.prompt,
            "has_new_line": "\n" in text,
            "truncated": one.stop_type == "limit" and one.num_prompt + len(one.tokens) >= self._context,
            "stop_type": one.stop_type,
            "stopping_word": one.stop_reason if is_word else "",
            "tokens_cached": one.cached,
            "timings": self._timings(one_id, one),
        }
        if one.logprobs:
            found["completion_probabilities"] = self._probabilities(one.logprobs)
        return found if self._body.response_fields is None else _selected(found, self._body.response_fields)

    def _timings(self, one_id: str, one: _Completion) -> dict[str, float]:
        line = self._timelines.get(one_id) or Timeline(0.0)
        computed = one.num_prompt - one.cached
        return {
            "cache_n": one.cached,
            **_speed("prompt", computed, line.seconds("prefill")),
            **_speed("predicted", len(one.tokens), line.seconds("decode")),
        }

    def _probabilities(self, logprobs: list[TokenLogprobs]) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            data = self._model.tokenizer.token_bytes(token)
            return {"id": token, "token": token_text(data), "bytes": list(data), "logprob": logprob}

        return [
            {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]}
            for item in logprobs
        ]


def generation_settings(params: SamplingParams, context: int | None) -> dict[str, Any]:
    """Return sampling parameters under llama.cpp's names."""
    structure = params.structure
    limit = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_ctx": context,
        "n_predict": limit,
        "max_tokens": limit,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop_strings),
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "grammar": "" if structure is None else structure.text,
        "samplers": ["penalties", "top_k", "top_p", "min_p", "temperature"],
    }


def _speed(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds else 0.0,
    }


def _selected(found: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """Return the values at these paths, such as "timings/prompt_n", which are their names; others are left out."""
    shown = {}
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            shown[path] = value
    return shown


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class LlamaEmbeddingGeneration(EmbeddingGeneration):
    """POST /embedding. The vector of each text is in a list, where llama.cpp has one for each token without pooling."""

    def __init__(self, body: LlamaEmbeddingRequest, model: ServedModel) -> None:
        if (body.content is None) == (body.input is None):
            raise InvalidParameter("content", "give either content or input", "missing_required_parameter")
        if body.embd_normalize not in (None, -1, _MAX_NORM):
            problem = f"must be {_MAX_NORM} (Euclidean) or -1 (none), got {body.embd_normalize}"
            raise InvalidParameter("embd_normalize", problem)
        self._name = "input" if body.content is None else "content"
        given = {
            name: getattr(body, name) for name in ("model", "timeout", "cache_salt", "priority", "targets", "user")
        }
        request = _embedding_request(
            self._name, {**given, "input": getattr(body, self._name), "normalize": body.embd_normalize != -1}
        )
        super().__init__(request, model)

    def rename_error(self, error: InvalidParameter) -> InvalidParameter:
        return error.renamed(renamed_parameter(error.parameter, {"input|prompt": self._name}))

    def response(self, head: dict[str, Any], vectors: list[bytes], usage: dict[str, Any]) -> Any:
        return [{"index": index, "embedding": [array("f", one).tolist()]} for index, one in enumerate(vectors)]


def _embedding_request(name: str, fields: dict[str, Any]) -> EmbeddingRequest:
    try:
        return parse_at("", EmbeddingRequest, fields)
    except InvalidParameter as error:
        raise error.renamed(renamed_parameter(error.parameter, {"input": name})) from None
