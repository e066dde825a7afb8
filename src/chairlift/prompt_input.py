"""Prompts and sampling parameters as the offline APIs accept them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift.text.reasoning_formats.base import ReasoningFormat
    from chairlift.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_PROMPT_OPTIONS = ("cache_salt", "priority", "tenant")  # optional keys of a prompt


class PromptInput:
    """A prompt as token ids, with the options that came with it."""

    def __init__(self, text: str | None, token_ids: list[int], options: Mapping[str, Any]) -> None:
        self.text = text
        self.token_ids = token_ids
        self.options = options  # arguments of Engine.submit

    @classmethod
    def parse(cls, prompt: Any, tokenizer: Tokenizer) -> PromptInput:
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


def parse_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer) -> list[PromptInput]:
    """Parse one prompt or a list of them."""
    if not isinstance(prompts, (Sequence, Mapping)):
        raise InvalidParameter("prompts", f"must be a prompt or a list of them, got {type(prompts).__name__}")
    single = isinstance(prompts, (str, Mapping)) or (bool(prompts) and isinstance(prompts[0], int))
    many: Sequence[Any] = [prompts] if single else prompts  # type: ignore[assignment]
    if not len(many):
        raise InvalidParameter("prompts", "is empty; give at least one prompt")
    return [PromptInput.parse(prompt, tokenizer) for prompt in many]


def params_of(
    inputs: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams
) -> list[SamplingParams]:
    """The parameters of each input; without any it is the default."""
    if params is None:
        params = default
    if isinstance(params, SamplingParams):
        return [params] * len(inputs)
    if len(params) != len(inputs):
        raise InvalidParameter("sampling_params", f"{len(params)} given for {len(inputs)} prompts; give one or as many")
    for one in params:
        if not isinstance(one, SamplingParams):
            raise InvalidParameter("sampling_params", f"must be SamplingParams, got {type(one).__name__}")
    return list(params)


def render_chat(conversation: Messages, options: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """A conversation as a prompt; `options` are those of `Tokenizer.encode_chat`."""
    text, token_ids = tokenizer.encode_chat(conversation, **options)
    return {"prompt": text, "prompt_token_ids": token_ids}


def after_reasoning(
    chat: Mapping[str, Any], params: SamplingParams, format_: ReasoningFormat | None, tokenizer: Tokenizer
) -> SamplingParams:
    """Let the structure of the answer to a rendered chat begin after the model's reasoning."""
    if params.structure is None or format_ is None:
        return params
    from chairlift.text.reasoning.reasoning_use import ReasoningUse  # imported late, like the tokenizer

    reasoning = ReasoningUse.after(chat["prompt_token_ids"], format_, tokenizer)
    return params.clone(structure=params.structure.after(reasoning.grammar(answer=True, preambles=False)))


def is_conversation(messages: Any) -> bool:
    """Whether this is one conversation and not a list of them."""
    return isinstance(messages, Sequence) and bool(messages) and isinstance(messages[0], Mapping)
