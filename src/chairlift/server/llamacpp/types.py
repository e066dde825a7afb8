"""The request bodies of llama.cpp's server: /completion, /infill, /embedding and /apply-template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from chairlift.core.sampling.params import MAX_LOGPROBS, SamplingParams
from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import EngineBody, Entries, RequestBody, StrictModel, parse_at
from chairlift.server.llamacpp.sampling import LlamaSampling, Whole, chosen_samplers
from chairlift.server.openai.types import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    CompletionRequest,
    Schema,
    Tools,
    check_token_ids,
    check_unicode,
)
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.unknown_fields import say_ignored
from chairlift.text.tokenizer import Tokenizer

MAX_RESPONSE_FIELDS = 64
MAX_CHUNKS = 1024  # pieces of further context
MAX_BIASES, MAX_BIAS_TEXT = 1024, 100  # entries, and characters of each
NEVER = -100.0  # the bias of a token that is never to be generated

PromptPart = str | list[int | str]

# Fields that steer llama.cpp's memory or its clock, which this server does by itself; other values than these are named
# in the header of ignored fields.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "cache_prompt": (True,),  # prefixes are shared by content
    "id_slot": (-1,),
    "slot_id": (-1,),
    "n_keep": (0, -1),
    "n_discard": (0,),
    "n_cache_reuse": (0,),
    "min_keep": (0, 1),
    "n_indent": (0,),
    "t_max_prompt_ms": (0,),
    "t_max_predict_ms": (0,),
    "return_progress": (False,),
    "penalize_nl": (False,),
}


class LoraScale(StrictModel):
    id: Whole
    scale: float


# Each is a token or a text, and its bias.
Biases = Annotated[list[Annotated[list[Any], Field(fail_fast=True, max_length=2)]], Field(fail_fast=True)]


class LlamaBody(LlamaSampling, EngineBody):
    """What /completion and /infill share."""

    n_predict: Whole | None = None
    max_tokens: Whole | None = None  # another name of n_predict
    n_cmpl: Whole | None = None
    n: Whole | None = None  # another name of n_cmpl
    stream: bool | None = None
    n_probs: Whole | None = None
    post_sampling_probs: bool | None = None
    logit_bias: dict[str, float | bool] | Biases | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    grammar_lazy: bool | None = None
    json_schema: Schema | None = None
    samplers: str | Annotated[list[str], Field(max_length=64)] | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=MAX_RESPONSE_FIELDS)] | None = None
    lora: Entries[LoraScale] | None = None
    cache_prompt: bool | None = None
    id_slot: Whole | None = None
    slot_id: Whole | None = None
    n_keep: Whole | None = None
    n_discard: Whole | None = None
    n_cache_reuse: Whole | None = None
    min_keep: Whole | None = None
    n_indent: Whole | None = None
    t_max_prompt_ms: Whole | None = None
    t_max_predict_ms: Whole | None = None
    return_progress: bool | None = None
    penalize_nl: bool | None = None

    refused: ClassVar[dict[str, str]] = {
        "post_sampling_probs": "log-probabilities are those of the model, before sampling",
        "grammar_lazy": "a grammar holds from the first token on",
    }

    @property
    def limit(self) -> int | None:
        """The tokens to generate; None, for a negative number or none: as many as fit."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given is None or given < 0 else given

    def params(self, model: ServedModel) -> SamplingParams:
        """Return the sampling parameters; errors about them have our names."""
        self._check()
        if self.n_probs is not None and not 0 <= self.n_probs <= MAX_LOGPROBS:
            raise InvalidParameter("n_probs", f"must be between 0 and {MAX_LOGPROBS}, got {self.n_probs}")
        shared = {name: getattr(self, name) for name in ("ignore_eos", "grammar", "json_schema")}
        fields = {
            **self.sampling(),
            **chosen_samplers(self.samplers),
            **shared,
            "logit_bias": None if self.logit_bias is None else self._biases(model.tokenizer),
            "n": self.n if self.n_cmpl is None else self.n_cmpl,
        }
        completion = parse_at("", CompletionRequest, {"prompt": "", **fields})
        defaults = model.defaults_of(self.model).sampling
        given = self.max_tokens if self.n_predict is None else self.n_predict
        limit = defaults.get("max_tokens") if given is None else self.limit
        return completion.sampling_params(defaults, max_tokens=limit, logprobs=self.n_probs or None)

    def lora_weights(self, model: ServedModel) -> dict[str, float] | None:
        if self.lora is None:
            return super().lora_weights(model)
        return model.adapters.scaled({one.id: one.scale for one in self.lora if one.scale}) or None

    def _check(self) -> None:
        for name, reason in self.refused.items():
            if getattr(self, name):
                raise InvalidParameter(name, f"is not supported: {reason}")
        for name, neutral in _WITHOUT_EFFECT.items():
            if (value := getattr(self, name)) is not None and value not in neutral:
                say_ignored(name)

    def _biases(self, tokenizer: Tokenizer) -> dict[str, float]:
        """Return the bias of each token id; false is never, and a text stands for each of its tokens."""
        given = self.logit_bias or {}
        if len(given) > MAX_BIASES:
            raise InvalidParameter("logit_bias", f"has {len(given)} entries; the limit is {MAX_BIASES}")
        pairs: list[list[Any]] = [[*pair] for pair in given.items()] if isinstance(given, dict) else given
        found: dict[str, float] = {}
        for index, pair in enumerate(pairs):
            place = f"logit_bias[{index}]"
            if len(pair) != 2 or isinstance(pair[0], bool) or not isinstance(pair[0], int | str):
                raise InvalidParameter(place, "must be a pair of a token id or a text and a number or false")
            token, bias = pair
            if bias is True or not isinstance(bias, int | float):
                raise InvalidParameter(place, "the bias must be a number or false")
            check_unicode(place, [str(token)])
            if isinstance(token, str) and len(token) > MAX_BIAS_TEXT:  # It is tokenized in the event loop.
                raise InvalidParameter(place, f"the text has more than {MAX_BIAS_TEXT} characters")
            is_id = isinstance(token, int) or (isinstance(given, dict) and token.isascii() and token.isdigit())
            ids = [token] if is_id else tokenizer.encode(token, add_special_tokens=False)
            found |= dict.fromkeys(map(str, ids), NEVER if bias is False else float(bias))
        return found


class LlamaCompletionRequest(LlamaBody):
    prompt: Any

    def prompts(self) -> list[PromptPart]:
        """Return the prompts: a text, a list of tokens and texts, an object with a text, or a list of these."""
        given = self.prompt
        is_one = not isinstance(given, list) or any(type(part) is int for part in given)
        found = [
            _prompt("prompt" if is_one else f"prompt[{index}]", one)
            for index, one in enumerate([given] if is_one else given)
        ]
        if not found or len(found) > MAX_PROMPTS:
            raise InvalidParameter("prompt", f"must have 1 to {MAX_PROMPTS} prompts, got {len(found)}")
        return found

    @property
    def is_list(self) -> bool:
        """Whether the response is a list."""
        return isinstance(self.prompt, list) and not any(type(part) is int for part in self.prompt)


def _prompt(place: str, given: Any) -> PromptPart:
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise InvalidParameter(f"{place}.multimodal_data", "is not supported: this server reads text only")
        given = given.get("prompt_string")
        place = f"{place}.prompt_string"
    if isinstance(given, str):
        check_unicode(place, [given])
        return given
    if not isinstance(given, list) or not all(type(part) in (int, str) for part in given):
        raise InvalidParameter(place, "must be a text, or a list of token ids and texts", "invalid_type")
    check_token_ids(place, [part for part in given if isinstance(part, int)])
    check_unicode(place, [part for part in given if isinstance(part, str)])
    return given


class ExtraContext(StrictModel):
    text: str
    filename: str | None = None
    time: Any = None  # llama.vim sends when it has taken the piece


class InfillRequest(LlamaBody):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraContext] | None, Field(fail_fast=True, max_length=MAX_CHUNKS)] = None
    prompt: str = ""  # the part of the line before the cursor, which continues the prefix

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the texts by their names, for checks."""
        for name in ("input_prefix", "input_suffix", "prompt"):
            yield name, getattr(self, name)
        for index, one in enumerate(self.input_extra or ()):
            yield f"input_extra[{index}]", f"{one.filename or ''}{one.text}"


class LlamaEmbeddingRequest(EngineBody):
    content: Any = None
    input: Any = None  # OpenAI's name of the content
    embd_normalize: Whole | None = None


class ApplyTemplateRequest(RequestBody):
    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
