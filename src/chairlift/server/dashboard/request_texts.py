"""The texts of recent requests for the dashboard, kept only while a page is open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.server.wire.messages import Update
from chairlift.text.tokenizer import Tokenizer

MAX_REQUESTS = 512
MAX_PROMPT_TOKENS = 400
MAX_CHARACTERS = 4000


@dataclass(slots=True)
class _Text:
    key: bytes | None  # API key of the request
    prompt: Sequence[int]  # the last tokens: many prompts share the first ones
    prompt_is_whole: bool
    pieces: list[str] = field(default_factory=list)
    size: int = 0


class RequestTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.is_watched = False  # whether any page is open, and texts are to be added
        self._tokenizer = tokenizer
        self._texts: OrderedDict[str, _Text] = OrderedDict()

    def open(self, ids: Sequence[str], prompt: Sequence[int], key: bytes | None) -> None:
        """Start the texts of all completions of one prompt."""
        for request_id in ids:
            self._texts[request_id] = _Text(key, prompt[-MAX_PROMPT_TOKENS:], len(prompt) <= MAX_PROMPT_TOKENS)
        while len(self._texts) > MAX_REQUESTS:
            self._texts.popitem(last=False)

    def add(self, update: Update) -> None:
        text = self._texts.get(update.request_id)
        if text is not None and text.size <= MAX_CHARACTERS:
            text.pieces.append(update.text)
            text.size += len(update.text)

    def find(self, request_id: str, key: bytes | None) -> dict[str, str | bool] | None:
        """Return the texts of a request; None if they are not kept or belong to another key."""
        text = self._texts.get(request_id)
        if text is None or text.key != key:
            return None
        return {
            "prompt": self._tokenizer.decode(list(text.prompt)),
            "prompt_is_whole": text.prompt_is_whole,
            "output": "".join(text.pieces)[:MAX_CHARACTERS],
            "output_is_whole": text.size <= MAX_CHARACTERS,
        }

    def clear(self) -> None:
        self._texts.clear()
