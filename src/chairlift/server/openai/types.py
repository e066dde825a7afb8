"""Request bodies. A null means absent; for unknown parameters see `server/wire/unknown_fields.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from chairlift.core.sampling.parameter import extra_parameter_names
from chairlift.core.sampling.params import SamplingParams
from chairlift.core.sampling.structure import MAX_STRUCTURE_LENGTH, Structure
from chairlift.errors import InvalidParameter
from chairlift.loading.request_defaults import RequestDefaults
from chairlift.server.generation.endpoint import (
    EngineBody,
    Entries,
    Integer,
    RequestBody,
    StrictModel,
    max_entries,
    parse_at,
)
from chairlift.server.served_model import ServedModel

Schema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(fail_fast=True)]


# ---- structured output: OpenAI's `response_format` and vLLM's `structured_outputs` ----------------------------------


class JSONSchema(StrictModel):
    name: Annotated[str | None, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = None  # OpenAI requires it
    schema_: Annotated[Schema, Field(alias="schema")]
    # Not shown to the model.
    description: Annotated[str | None, Field(max_length=MAX_STRUCTURE_LENGTH)] = None
    strict: bool | None = None  # ignored: the schema is always enforced


class TextFormat(StrictModel):
    type: Literal["text"]

    def structure(self) -> Structure | None:
        return None


class JSONObjectFormat(StrictModel):
    type: Literal["json_object"]
    schema_: Annotated[Schema | None, Field(alias="schema")] = None  # llama.cpp has it here.

    def structure(self) -> Structure | None:
        if self.schema_ is not None:
            return Structure.json(self.schema_, "response_format.schema")
        return Structure.json_object("response_format")


class JSONSchemaFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JSONSchema

    def structure(self) -> Structure | None:
        return Structure.json(self.json_schema.schema_, "response_format.json_schema.schema")


ResponseFormat = Annotated[TextFormat | JSONObjectFormat | JSONSchemaFormat, Field(discriminator="type")]

_STRUCTURED_OUTPUTS: dict[str, Callable[[Any, str], Structure]] = {
    "json_": Structure.json,
    "regex": Structure.regex,
    "choice": Structure.choice,
    "grammar": Structure.grammar,
}


class StructuredOutputs(StrictModel):
    """vLLM's parameter: exactly one of the fields."""

    json_: Annotated[str | Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def structure(self) -> Structure:
        name = "structured_outputs"
        found = [
            make(value, f"{name}.{kind.rstrip('_')}")
            for kind, make in _STRUCTURED_OUTPUTS.items()
            if (value := getattr(self, kind)) is not None
        ]
        if self.json_object:
            found.append(Structure.json_object(f"{name}.json_object"))
        if len(found) != 1:
            raise InvalidParameter(name, "give exactly one of json, regex, choice, grammar and json_object")
        return found[0]


# ---- bodies ----------------------------------------------------------------------------------------------------------

MAX_PROMPTS = 256
MAX_MESSAGES = 2048
MAX_GIVEN_TOOLS = 2048  # more than the model may be offered: some APIs leave out or defer some of them

TokenIds = Entries[Integer]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_GIVEN_TOOLS)]
Label = Annotated[str | None, Field(max_length=512)]
_REFUSED = {
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "audio": "this server writes text only",
    "web_search_options": "this server searches nothing; give the model a tool that does",
}

# Parameters that have this name, or a meaning, on some generation endpoints only.
GENERATION_NAMES = (
    *("messages", "prompt", "input", "instructions", "system", "suffix", "tools", "tool_choice", "response_format"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens_to_sample", "stop_sequences"),
    *("n", "best_of", "use_beam_search", "beam_width", "echo", "logprobs", "top_logprobs", "prompt_logprobs"),
)

# Parameters that are structures, of vLLM and of llama.cpp.
_STRUCTURES: dict[str, Callable[[Any, str], Structure]] = {
    "guided_json": Structure.json,
    "guided_regex": Structure.regex,
    "guided_choice": Structure.choice,
    "guided_grammar": Structure.grammar,
    "json_schema": Structure.json,
}


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # events have no padding


class GenerationBody(EngineBody):
    """Parameters of every generation endpoint. Beyond OpenAI's: top_k, min_p, repetition_penalty, min_tokens,
    ignore_eos, stop_token_ids, include_stop_str_in_output, skip_special_tokens, timeout (seconds), cache_salt,
    priority (lower is sooner), targets, thinking_token_budget, preset (a name of `--presets`), and for structured
    output guided_json, guided_regex, guided_choice, guided_grammar and structured_outputs."""

    refused_names: ClassVar[Collection[str]] = GENERATION_NAMES

    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=1024), max_entries(1024)] = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[Integer] | None, Field(max_length=256)] = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    thinking_token_budget: Integer | None = None
    preset: Annotated[str | None, Field(max_length=64)] = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None  # llama.cpp's names of guided_json and guided_grammar
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    _system_prompt: str | None = PrivateAttr(default=None)
    _extra_args: dict[str, Any] = PrivateAttr(default_factory=dict)  # parameters registered by plugins

    def take_extras(self, extras: dict[str, Any]) -> None:
        values = {name: extras.pop(name) for name in extra_parameter_names() if name in extras}
        self._extra_args = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def known_fields(cls) -> Collection[str]:
        return {*super().known_fields(), *extra_parameter_names()}

    def structure(self) -> Structure | None:
        found = self.structures()
        if len(found) > 1:
            first, second = (structure.parameter for structure in found[:2])
            raise InvalidParameter(second, f"was given together with {first}; give one")
        for structure in found:
            check_unicode(structure.parameter, [structure.text])
        return found[0] if found else None

    def _stop_strings(self) -> list[str]:
        """The stop strings; an empty one, which clients send for none, stops nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        check_unicode("stop", given)
        return [text for text in given if text]

    def chat_request(self, **parameters: Any) -> ChatRequest:
        """Return a chat completion request with these parameters and those that all generation endpoints share. Its
        messages are added after admission."""
        shared = {name: getattr(self, name) for name in GenerationBody.model_fields}
        messages = [{"role": "user", "content": ""}]
        return parse_at("", ChatRequest, shared | self._extra_args | {"messages": messages} | parameters)

    def structures(self) -> list[Structure]:
        return [
            *(make(value, name) for name, make in _STRUCTURES.items() if (value := getattr(self, name)) is not None),
            *([Structure.grammar(self.grammar, "grammar")] if self.grammar else []),
            *([self.structured_outputs.structure()] if self.structured_outputs else []),
        ]

    def defaults(self, model: ServedModel) -> RequestDefaults:
        """Find what the request leaves out, and note its system prompt."""
        if self.preset is None and (self.model is None or self.model in model.names):
            found = model.defaults
        else:
            found = model.defaults_of(self.model, self.preset)
        self._system_prompt = found.system_prompt
        return found

    @property
    def system_prompt(self) -> str | None:
        """The system prompt if the conversation has none, once the parameters are read."""
        return self._system_prompt

    def sampling_params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """Return the sampling parameters; absent ones are as in `defaults`, which are the model's or a preset's."""
        shared = [field.name for field in fields(SamplingParams) if field.name in GenerationBody.model_fields]
        given = {name: value for name in shared if (value := getattr(self, name)) is not None}
        given |= {} if self.logit_bias is None else {"logit_bias": _logit_bias(self.logit_bias)}
        given |= {} if self.seed is None else {"seed": _seed(self.seed)}
        given |= {} if self.stop is None else {"stop": self._stop_strings()}
        if self.top_p == 0:  # the limit: only the most likely token
            given |= {"top_p": 1.0, "top_k": 1}
        check_unicode("user", [self.user or ""])
        return SamplingParams.with_defaults(
            defaults, **given, structure=self.structure(), extra_args=self._extra_args, **more
        )


class CompletionBody(GenerationBody):
    """Further parameters of chat and text completions. Beyond OpenAI's: beam search (use_beam_search or beam_width,
    length_penalty, early_stopping) and prompt_logprobs."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    best_of: Integer | None = None
    use_beam_search: bool | None = None
    beam_width: Integer | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Integer | None = None

    def structures(self) -> list[Structure]:
        structure = self.response_format.structure() if self.response_format else None
        return [*([structure] if structure else []), *super().structures()]

    def sampling_params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                more[name] = getattr(self, name)
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter("stream", "cannot be true with prompt_logprobs")
        n = 1 if self.n is None else self.n
        params = super().sampling_params(defaults, n=n, **self._selection(n), **more)
        if self.stream and (params.beam_width or params.best_of):
            problem = "cannot be true with best_of or beam search: the best completions are only known at the end"
            raise InvalidParameter("stream", problem)
        return params

    def _selection(self, n: int) -> dict[str, Any]:
        """Return the parameters of best-of sampling or beam search; with beam search, best_of is the beam width."""
        if self.use_beam_search is False and self.beam_width is not None:
            raise InvalidParameter("use_beam_search", "is false, but beam_width was given")
        if not self.use_beam_search and self.beam_width is None:
            return {"best_of": self.best_of}
        if self.best_of is not None and self.beam_width is not None:
            raise InvalidParameter("best_of", "was given together with beam_width; give one")
        width = self.beam_width or self.best_of or n
        if width < 2:
            raise InvalidParameter("beam_width", "must be at least 2: say how many beams the search has")
        return {"beam_width": width}

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "only goes with stream: true")


class CompletionRequest(CompletionBody):
    prompt: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Integer | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def params(self, model: ServedModel) -> SamplingParams:
        defaults = self.defaults(model).sampling
        self.check_stream_options()
        if self.suffix is not None and self.echo:
            raise InvalidParameter("echo", "does not go with suffix: the completion is not at the prompt's end")
        check_max_tokens(
            "max_tokens", self.max_tokens, about_prompt=bool(self.echo) or self.prompt_logprobs is not None
        )
        scored = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scored = max(self.logprobs, scored or 0)
        limit = defaults.get("max_tokens", 16) if self.max_tokens is None else self.max_tokens
        return self.sampling_params(defaults, max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=scored)

    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


class Prediction(StrictModel):
    """The expected output. It changes no answer, and does not make this server faster."""

    type: Literal["content"]
    content: str | Entries[dict[str, Any]]


class ThinkingSwitch(StrictModel):
    """The switch for reasoning of DeepSeek's, Z.ai's and Moonshot's APIs."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: Integer | None = None


class WithLabels(StrictModel):
    """Parameters of OpenAI that are for its accounts and its storage: they have no effect on the answer."""

    store: bool | None = None  # nothing is stored
    metadata: Annotated[dict[str, str] | None, Field(max_length=16), max_entries(16)] = None
    safety_identifier: Label = None
    # Prefixes are shared by content and kept as long as there is room.
    prompt_cache_key: Label = None
    prompt_cache_retention: Label = None


class ChatRequest(WithLabels, CompletionBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # The answer begins with the last message, if that is the assistant's.
    reasoning_effort: Effort | None = None
    thinking: bool | ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    thinking_budget: Integer | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # Only some templates read it.
    modalities: Entries[Literal["text"]] | None = None
    prediction: Prediction | None = None
    include_reasoning: bool | None = None  # false leaves the reasoning out of the response
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Declared to be refused with a reason.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None

    def params(self, model: ServedModel) -> SamplingParams:
        self.check_stream_options()
        for name, reason in _REFUSED.items():
            if getattr(self, name) is not None:
                raise InvalidParameter(name, f"is not supported: {reason}")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidParameter("max_tokens", "was given together with max_completion_tokens; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs: true")
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        check_max_tokens(name, limit, about_prompt=self.prompt_logprobs is not None)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        more: dict[str, Any] = {"logprobs": logprobs, "prompt_logprobs": self.prompt_logprobs}
        if model.reasoning_format is not None and self.thinking_token_budget is None:
            # The budget of other servers' parameters, which has no effect on models that do not reason.
            budget = self.thinking_budget
            if budget is None and isinstance(self.thinking, ThinkingSwitch):
                budget = self.thinking.budget_tokens
            more |= {} if budget is None else {"thinking_token_budget": budget}
        defaults = self.defaults(model).sampling
        limit = defaults.get("max_tokens") if limit is None else limit
        return self.sampling_params(defaults, max_tokens=limit, **more)


class TokenizeRequest(RequestBody):
    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # llama.cpp's name of the prompt
    messages: Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_MESSAGES)] = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # llama.cpp's name of add_special_tokens, false by default
    with_pieces: bool | None = None  # llama.cpp's: the text or the bytes of each token.
    return_token_strs: bool | None = None  # vLLM's: the entries of the vocabulary.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: TokenIds


def check_max_tokens(parameter: str, limit: int | None, *, about_prompt: bool) -> None:
    """Refuse a limit of 0 unless the response has something about the prompt."""
    if limit == 0 and not about_prompt:
        raise InvalidParameter(parameter, "must be at least 1, or 0 with echo or prompt_logprobs")


def check_token_ids(parameter: str, tokens: list[int]) -> list[int]:
    """Refuse ids that messages to the engine cannot encode; the engine checks them against its vocabulary."""
    for token in tokens:
        if not 0 <= token < 2**31:
            raise InvalidParameter(parameter, f"token id {str(token)[:40]} is out of range")
    return tokens


def check_unicode(parameter: str, texts: Iterable[str]) -> None:
    """Refuse lone surrogates, which JSON can encode but messages to the engine cannot."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(parameter, "must be valid Unicode") from None


def _seed(given: int | None) -> int | None:
    """Return the seed of the engine: -1 stands for none, as in vLLM and llama.cpp, other negative ones are shifted."""
    if given is None or given == -1:
        return None
    return given + 2**63 if -(2**63) <= given < 0 else given


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for token in given:
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise InvalidParameter("logit_bias", f"keys must be token ids, got {token[:40]!r}")
    return {int(token): value for token, value in given.items()}
