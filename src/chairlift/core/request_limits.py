"""The limits that a model sets for requests, as plain numbers for use in other processes too."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class RequestLimits:
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together

    def check_prompt_length(self, num_tokens: int, parameter: str = "prompt", *, prompt_only: bool = False) -> None:
        """Raise if a prompt of `num_tokens` is empty or leaves no room for output, if there is to be any."""
        if num_tokens < 1:
            raise InvalidParameter(parameter, "is empty; give at least one token")
        if num_tokens >= self.max_model_len + prompt_only:
            most = "fit" if prompt_only else "leave room for an answer"
            problem = f"has {num_tokens} tokens, but at most {self.max_model_len - 1 + prompt_only} {most}"
            raise InvalidParameter(parameter, f"{problem} (max_model_len is {self.max_model_len})")
