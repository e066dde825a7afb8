"""The limits that a model sets for requests, as plain numbers for use in other processes too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import countOf

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import CONTEXT_LENGTH_EXCEEDED, InvalidParameter


@dataclass(frozen=True, slots=True)
class RequestLimits:
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together

    def check_lengths(self, num_prompt: int, max_tokens: int | None, parameter: str, *, prompt_only: bool) -> None:
        """Raise if a prompt, or a prompt and the `max_tokens` of output that were asked for, exceed the context."""
        self.check_prompt_length(num_prompt, parameter, prompt_only=prompt_only)
        if max_tokens is not None:
            self.check_total_length(num_prompt, max_tokens)

    def check_prompt_length(self, num_tokens: int, parameter: str = "prompt", *, prompt_only: bool = False) -> None:
        """Raise if a prompt of `num_tokens` is empty or leaves no room for output, if there is to be any."""
        if num_tokens < 1:
            raise InvalidParameter(parameter, "is empty; give at least one token")
        if num_tokens >= self.max_model_len + prompt_only:
            most = "fit" if prompt_only else "leave room for an answer"
            problem = f"has {num_tokens} tokens, but at most {self.max_model_len - 1 + prompt_only} {most}"
            raise self._exceeded(parameter, problem)

    def check_total_length(self, num_prompt: int, max_tokens: int, parameter: str = "max_tokens") -> None:
        """Raise if a prompt and `max_tokens` of output exceed the context."""
        if num_prompt + max_tokens > self.max_model_len:
            problem = f"{max_tokens} is too large for a prompt of {num_prompt} tokens"
            raise self._exceeded(parameter, f"{problem}; lower it, or leave it out to use what is left")

    def check_params(self, params: SamplingParams) -> None:
        """Raise if sampling parameters, which are valid by themselves, name tokens that the model does not have."""
        self.check_tokens("stop_token_ids", params.stop_ids)
        self.check_tokens("logit_bias", list(params.logit_bias or ()))

    def check_tokens(self, parameter: str, tokens: Sequence[int]) -> None:
        """Raise if one of them is no token id. Prompts are long, so a Python loop only looks for the one to name."""
        if not len(tokens):
            return
        # Subclasses of int, such as bool, are checked one by one.
        if countOf(map(type, tokens), int) == len(tokens) and min(tokens) >= 0 and max(tokens) < self.vocab_size:
            return
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidParameter(parameter, f"token ids must be integers, got {token!r}")
            if not 0 <= token < self.vocab_size:
                raise InvalidParameter(parameter, f"token id {token} is outside the vocabulary of {self.vocab_size}")

    def _exceeded(self, parameter: str, problem: str) -> InvalidParameter:
        # Clients look for this phrase of OpenAI's in the message.
        context = f"this model's maximum context length is {self.max_model_len} tokens"
        return InvalidParameter(parameter, f"{problem} ({context})", CONTEXT_LENGTH_EXCEEDED)
