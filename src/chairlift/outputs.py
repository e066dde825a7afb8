"""The offline API's prompts and results: what calls accept, what they return, and how events become results."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from chairlift.core.events import (
    Event,
    PromptPooled,
    PromptScored,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TextProduced,
    TokenProduced,
)
from chairlift.core.images import PromptImage
from chairlift.core.plan import TokenLogprobs
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.targets import Targets
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.loading.request_defaults import RequestDefaults

if TYPE_CHECKING:
    from chairlift.text.reasoning_formats.base import ReasoningFormat
    from chairlift.text.tokenizer import Tokenizer
    from chairlift.vision.processor import ImageProcessor


Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_PROMPT_OPTIONS = ("cache_salt", "priority", "tenant", "targets", "lora")  # optional keys of a prompt


class PromptInput:
    """A prompt as token ids, with the options that came with it."""

    def __init__(self, text: str | None, token_ids: list[int], options: Mapping[str, Any]) -> None:
        self.text = text
        self.token_ids = token_ids
        self.options = options  # arguments of Engine.submit

    @classmethod
    def parse(cls, prompt: Any, tokenizer: Tokenizer, images: ImageProcessor | None = None) -> PromptInput:
        fields = dict(prompt) if isinstance(prompt, Mapping) else {}
        if isinstance(prompt, str):
            fields["prompt"] = prompt
        elif not isinstance(prompt, Mapping):
            fields["prompt_token_ids"] = prompt
        text, token_ids = fields.pop("prompt", None), fields.pop("prompt_token_ids", None)
        given = fields.pop("images", None)
        placed = given if _are_placed(given) else ()
        pictures = _pictures(None if placed else given, fields.pop("multi_modal_data", None))
        options = {name: fields.pop(name) for name in _PROMPT_OPTIONS if fields.get(name) is not None}
        if fields:
            known = ", ".join(("prompt", "prompt_token_ids", "images", *_PROMPT_OPTIONS))
            raise InvalidParameter("prompt", f"unknown keys {sorted(fields)}; use {known}")
        for name in ("cache_salt", "tenant"):
            if not isinstance(options.get(name, ""), str):
                raise InvalidParameter(name, f"must be a string, got {type(options[name]).__name__}")
        if "targets" in options:
            options["targets"] = Targets.of_milliseconds(options["targets"])
        if placed:
            options["images"] = placed
        if pictures:
            if images is None:
                raise InvalidParameter("images", "this model reads text only")
            if not isinstance(text, str):
                raise InvalidParameter("prompt", "must be a string with a marker for each image")
            prepared = images.prepare(text, pictures)
            token_ids, options["images"] = prepared.tokens, prepared.images
        elif token_ids is None:
            if not isinstance(text, str):
                raise InvalidParameter("prompt", f"must be a string or token ids, got {type(text).__name__}")
            token_ids = tokenizer.encode(text)
        elif isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise InvalidParameter("prompt", f"token ids must be a list, got {type(token_ids).__name__}")
        return cls(text, list(token_ids), options)


def _are_placed(images: Any) -> bool:
    """Whether these are images that a conversation's prompt has already."""
    return isinstance(images, tuple) and bool(images) and all(isinstance(each, PromptImage) for each in images)


def _pictures(images: Any, multi_modal: Any) -> list[Any]:
    """The pictures of a prompt, under our name for them or under vLLM's."""
    if isinstance(multi_modal, Mapping):
        if images is not None or set(multi_modal) - {"image"}:
            raise InvalidParameter("multi_modal_data", "only images are read, under the key 'image'")
        images = multi_modal.get("image")
    if images is None:
        return []
    from chairlift.vision.reading import read_image  # imported late, like the tokenizer

    listed = list(images) if isinstance(images, (list, tuple)) else [images]
    return [read_image(each, f"images[{i}]") for i, each in enumerate(listed)]


def parse_prompts(
    prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer, images: ImageProcessor | None = None
) -> list[PromptInput]:
    """Parse one prompt or a list of them."""
    if not isinstance(prompts, (Sequence, Mapping)):
        raise InvalidParameter("prompts", f"must be a prompt or a list of them, got {type(prompts).__name__}")
    single = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], int))
    many: Sequence[Any] = [prompts] if single else prompts  # type: ignore[assignment]
    if not len(many):
        raise InvalidParameter("prompts", "is empty; give at least one prompt")
    return [PromptInput.parse(prompt, tokenizer, images) for prompt in many]


def params_of(
    inputs: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams
) -> list[SamplingParams]:
    """The parameters of each input; without any it is the default."""
    if params is None:
        params = default
    if isinstance(params, SamplingParams):
        return [params] * len(inputs)
    if isinstance(params, (str, Mapping)) or not isinstance(params, Sequence):
        raise InvalidParameter("sampling_params", f"must be SamplingParams, got {type(params).__name__}")
    if len(params) != len(inputs):
        raise InvalidParameter("sampling_params", f"{len(params)} given for {len(inputs)} prompts; give one or as many")
    for each in params:
        if not isinstance(each, SamplingParams):
            raise InvalidParameter("sampling_params", f"must be SamplingParams, got {type(each).__name__}")
    return list(params)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the conversations with a model become prompts, which are those of the server."""

    tokenizer: Tokenizer
    reasoning: ReasoningFormat | None
    defaults: RequestDefaults
    images: ImageProcessor | None = None

    def prompt(
        self, conversation: Messages, *, preset: str | None = None, tools: Any = None, **options: Any
    ) -> dict[str, Any]:
        """A conversation as a prompt; `options` are those of `Tokenizer.encode_chat`."""
        if not is_conversation(conversation):
            form = 'one conversation or several, each a list of {"role": …, "content": …}'
            raise InvalidParameter("messages", f"must be {form}, got {conversation!r:.100}")
        from chairlift.text.images import ChatImages  # imported late, like the tokenizer
        from chairlift.text.tool_formats.base import choose_format
        from chairlift.text.tools.tool_use import ToolUse

        format_ = choose_format(self.tokenizer.chat_template or "")
        system_prompt = self.defaults.preset(preset).system_prompt
        (conversation, pictures), prepared = ChatImages.of(conversation), list[Any]()
        if self.images is None and pictures.sources:
            pictures.refuse()
        elif self.images is not None and pictures.sources:
            from chairlift.vision.reading import read_image

            named = zip(pictures.sources, pictures.locations, strict=True)
            prepared = self.images.prepare_chat(pictures, (read_image(source, name) for source, name in named))
        text, token_ids = ToolUse.of(format_, tools, None, None).prompt(
            self.tokenizer,
            conversation,
            reasoning=self.reasoning,
            system_prompt=system_prompt,
            images=pictures,
            **options,
        )
        prompt = {"prompt": text, "prompt_token_ids": token_ids}
        if self.images is not None and prepared:
            prompt["images"] = self.images.place(token_ids, prepared, "messages")
        return prompt

    def params(self, preset: str | None = None, *, chat: bool = False) -> SamplingParams:
        """The parameters of calls without any. An answer of a conversation may fill the context, as in the server."""
        length: dict[str, Any] = {"max_tokens": None} if chat else {}
        return SamplingParams.with_defaults(length | {**self.defaults.preset(preset).sampling})

    def after_reasoning(self, chat: Mapping[str, Any], params: SamplingParams) -> SamplingParams:
        """Let the structure of the answer to a rendered chat begin after the model's reasoning."""
        if params.structure is None or self.reasoning is None:
            return params
        from chairlift.text.reasoning import ReasoningUse  # imported late, like the tokenizer

        reasoning = ReasoningUse.after(chat["prompt_token_ids"], self.reasoning, self.tokenizer)
        return params.clone(structure=params.structure.after(reasoning.grammar(answer=True, preambles=False)))


def check_preset(preset: str | None, params: object) -> None:
    """Raise if a preset would have no effect on a plain prompt."""
    if preset is not None and params is not None:
        raise InvalidParameter("preset", "was given together with sampling_params; give one")


def is_conversation(messages: Any) -> bool:
    """Whether this is one conversation and not a list of them."""
    return isinstance(messages, Sequence) and bool(messages) and all(isinstance(each, Mapping) for each in messages)


def conversations_of(messages: Any) -> list[Any]:
    """One conversation or several as a list."""
    if is_conversation(messages) or isinstance(messages, str) or not isinstance(messages, Sequence):
        return [messages]
    return list(messages)


_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = 6
_SHORT.maxstring, _SHORT.maxother = 100, sys.maxsize


class ShortRepr:
    """A dataclass whose `repr` shows the fields with a value, and long ones shortened."""

    __slots__ = ()

    def __repr__(self) -> str:
        values = [(one, getattr(self, one.name)) for one in fields(self)]  # type: ignore[arg-type]
        shown = [f"{one.name}={_SHORT.repr(value)}" for one, value in values if value not in (None, one.default)]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token.

    Attributes:
        logprob: the natural logarithm of its probability.
        rank: its position in the vocabulary by probability, from 1; None if it is not known.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True, repr=False)
class RequestMetrics(ShortRepr):
    """Times of a request, in seconds on the engine's clock.

    Attributes:
        arrival: when it was submitted.
        boarded: when it was first admitted.
        token_times: when each token of the first completion came.
        finished: when it ended.
        preemptions: how often it lost its place and had to begin again.
    """

    arrival: float
    boarded: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    preemptions: int = 0

    @property
    def queued(self) -> float | None:
        """Seconds in the queue before the first step."""
        return None if self.boarded is None else self.boarded - self.arrival

    @property
    def time_to_first_token(self) -> float | None:
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def inter_token(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def end_to_end(self) -> float | None:
        return None if self.finished is None else self.finished - self.arrival


@dataclass(slots=True, repr=False)
class CompletionOutput(ShortRepr):
    """One completion of a prompt.

    Attributes:
        index: its number among the completions of the prompt.
        text: the text.
        token_ids: the tokens.
        cumulative_logprob: the sum of the log-probabilities, with `logprobs`.
        logprobs: for each token a dict of token id → `Logprob` (`logprob`, `rank`, `decoded_token`).
        finish_reason: `stop`, `length`, `cancelled`, `deadline` or `error`.
        stop_reason: the stop string or stop token, or the message of an error.
        score: of beam search and `best_of`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None


@dataclass(slots=True, repr=False)
class RequestOutput(ShortRepr):
    """A prompt and its completions.

    Attributes:
        request_id: its id.
        prompt: the text; None if token ids were given.
        prompt_token_ids: its tokens.
        outputs: a `CompletionOutput` for each completion.
        metrics: times, in seconds on the engine's clock: `arrival`, `queued`, `time_to_first_token`, `inter_token`,
            `end_to_end`, `preemptions`.
        cached_tokens: prompt tokens that the prefix cache had.
        prompt_logprobs: with `SamplingParams(prompt_logprobs=…)`: for each token a dict of token id → `Logprob`; None
            for the first.
        vector: with pooling: the vector.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    vector: list[float] | None = None

    def require_vector(self) -> list[float]:
        """The pooled vector; raises if the request ended without one."""
        if self.vector is None:
            raise ChairliftError(f"the request ended early: {self.outputs[0].finish_reason}")
        return self.vector

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True, slots=True, repr=False)
class EmbeddingOutput(ShortRepr):
    """An embedding.

    Attributes:
        embedding: the vector.
    """

    embedding: list[float]


@dataclass(frozen=True, slots=True, repr=False)
class EmbeddingRequestOutput(ShortRepr):
    """A prompt and its embedding.

    Attributes:
        request_id: its id.
        prompt_token_ids: its tokens.
        outputs: the embedding.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A score.

    Attributes:
        score: how well two texts go together; higher is better.
    """

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of a pair of texts.

    Attributes:
        outputs: the score.
    """

    outputs: ScoringOutput


@dataclass(frozen=True, slots=True)
class StreamedText:
    """A piece of one completion, as it is generated.

    Attributes:
        prompt_index: the number of the prompt in the call.
        completion_index: the number of the completion of that prompt.
        text: the new text, which may be empty.
        token_ids: the new tokens.
        finish_reason: None until the last piece; `stop`, `length`, `cancelled`, `deadline` or `error`.
    """

    prompt_index: int
    completion_index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class ResultCollector:
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

    def add(self, ids: Sequence[str], prompt: PromptInput, params: SamplingParams, now: float) -> None:
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
        result = RequestOutput(ids[0], prompt.text, prompt.token_ids, completions, RequestMetrics(arrival=now))
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None]  # nothing comes before the first token
        self.results.append(result)

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
            case PromptScored():
                assert result.prompt_logprobs is not None
                result.prompt_logprobs += [self._entry(scored) for scored in event.logprobs]
            case PromptPooled():
                result.vector = list(event.vector)
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

    def _add_logprobs(self, completion: CompletionOutput, scored: TokenLogprobs | None) -> None:
        if scored is None or completion.logprobs is None or completion.cumulative_logprob is None:
            return
        completion.cumulative_logprob += scored.logprob
        completion.logprobs.append(self._entry(scored))

    def _entry(self, scored: TokenLogprobs) -> dict[int, Logprob]:
        entries = {token: (value, rank) for rank, (token, value) in enumerate(scored.top, start=1)}
        entries[scored.token_id] = (scored.logprob, scored.rank)
        return {
            token: Logprob(value, rank, self._tokenizer.decode([token], skip_special_tokens=False))
            for token, (value, rank) in entries.items()
        }

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
