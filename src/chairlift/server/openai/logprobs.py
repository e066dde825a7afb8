"""Log-probabilities as the endpoints word them. A token may be a part of a character, so its bytes are what is true,
and its text is made from them."""

from __future__ import annotations

from typing import Any

from chairlift.core.logprobs import TokenLogprobs
from chairlift.text.detokenizer import IncrementalDetokenizer
from chairlift.text.tokenizer import Tokenizer


def token_text(data: bytes) -> str:
    """Text where the bytes are some, else the bytes spelled out, as in `\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(found: list[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """For chats and responses."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}

    return [
        {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]} for item in found
    ]


class CompletionLogprobs:
    """For text completions: lists side by side, with each token's place in the text. Remembers how far it got."""

    def __init__(self) -> None:
        self._length = 0
        self._text: IncrementalDetokenizer | None = None

    def take(self, found: list[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
        self._text = self._text or tokenizer.detokenizer()
        offsets = []
        for item in found:
            offsets.append(self._length)
            self._length += len(self._text.push(item.token_id))  # a character counts with the last of its tokens
        return {
            "tokens": [_key(tokenizer.token_bytes(item.token_id)) for item in found],
            "token_logprobs": [item.logprob for item in found],
            "top_logprobs": [_best(item, tokenizer) for item in found],
            "text_offset": offsets,
        }


def _best(item: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """By text. Of tokens with the same text (a special one and its spelling, say) the likeliest counts."""
    best: dict[str, float] = {}
    for token, logprob in item.top:
        best.setdefault(_key(tokenizer.token_bytes(token)), logprob)  # they come in order
    return best


def _key(data: bytes) -> str:
    text = token_text(data)
    return text if text.encode() == data else f"bytes:{text}"
