"""Log-probabilities in the formats of the endpoints.

A token may be part of a character, so the text of a token is derived from its bytes.
"""

from __future__ import annotations

from typing import Any

from chairlift.core.sampling.logprobs import TokenLogprobs
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer


def token_text(data: bytes) -> str:
    """Decode a token's bytes, or escape them as in `\\xf0\\x9f` if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(logprobs: list[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the logprobs of a chat completion or a response: one object per token."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}

    return [
        {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]} for item in logprobs
    ]


class CompletionLogprobs:
    """Log-probabilities of one text completion: parallel lists, with each token's offset in the text."""

    def __init__(self) -> None:
        self._length = 0
        self._detokenizer: IncrementalDetokenizer | None = None

    def add(self, logprobs: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the lists for the next tokens of the completion."""
        self._detokenizer = self._detokenizer or tokenizer.detokenizer()
        offsets = []
        for item in logprobs:
            offsets.append(self._length)
            # A character of several tokens counts for the last of them.
            self._length += len(self._detokenizer.push(item.token_id))
        return {
            "tokens": [_key(tokenizer.token_bytes(item.token_id)) for item in logprobs],
            "token_logprobs": [item.logprob for item in logprobs],
            "top_logprobs": [_top(item, tokenizer) for item in logprobs],
            "text_offset": offsets,
        }


def _top(item: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the top log-probabilities by text. Of tokens with the same text (a special token and its spelling), the
    most probable one is kept."""
    top: dict[str, float] = {}
    for token, logprob in item.top:  # in order of probability
        top.setdefault(_key(tokenizer.token_bytes(token)), logprob)
    return top


def _key(data: bytes) -> str:
    text = token_text(data)
    return text if text.encode() == data else f"bytes:{text}"
