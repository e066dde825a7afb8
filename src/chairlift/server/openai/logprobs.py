"""Log-probabilities in the formats of the endpoints.

A token may be part of a character, so the text of a token is derived from its bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chairlift.core.plan import TokenLogprobs
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


def prompt_logprobs(logprobs: list[TokenLogprobs], top: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return the logprobs of a prompt in vLLM's format: objects by token id, none for the first token."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer.token_bytes(token))}

    def entries(item: TokenLogprobs) -> dict[str, Any]:
        found = {
            str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top[:top], start=1)
        }
        return {str(item.token_id): entry(item.token_id, item.logprob, item.rank)} | found

    return [None, *map(entries, logprobs)]


class CompletionLogprobs:
    """Log-probabilities of one text completion: parallel lists, with each token's offset in the text."""

    def __init__(self) -> None:
        self._length = 0
        self._detokenizer: IncrementalDetokenizer | None = None

    def add_echo(
        self, first_token: int, logprobs: list[TokenLogprobs], text: str, top: int, tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return the lists for an echoed prompt with this text; its first token has no log-probability.

        `top`: the number of alternatives to list.
        """
        first = TokenLogprobs(first_token, 0.0, 1, ())
        lists = self.add([first, *(replace(item, top=item.top[:top]) for item in logprobs)], tokenizer)
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        self._length, self._detokenizer = len(text), None
        return lists

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
    """Return the top log-probabilities and that of the token itself by text. Of tokens with the same text (a special
    token and its spelling), the token itself or else the most probable one is kept."""
    top = {_key(tokenizer.token_bytes(item.token_id)): item.logprob}
    for token, logprob in item.top:  # The order is that of probability.
        top.setdefault(_key(tokenizer.token_bytes(token)), logprob)
    return top


def _key(data: bytes) -> str:
    text = token_text(data)
    return text if text.encode() == data else f"bytes:{text}"
