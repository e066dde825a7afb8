"""Tokens to text as they come, and the stop strings in it."""

from __future__ import annotations

from chairlift.core.request import Request
from chairlift.text.stop_strings import StopStrings
from chairlift.text.tokenizer import Tokenizer


class OutputText:
    """The text of every open request. `push` is the scheduler's stop-string check."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def open(self, request: Request) -> None:
        if request.params.detokenize:
            self._streams[request.id] = _Stream(self._tokenizer, request)

    def push(self, request: Request, token: int) -> str | None:
        """Take in a token just appended to `request`; returns the stop string that it completes, if any."""
        stream = self._streams.get(request.id)
        return stream.push(request, token) if stream else None

    def take(self, request_id: str) -> str:
        """The text that became safe to show since the last call."""
        stream = self._streams.get(request_id)
        return stream.take() if stream else ""

    def close(self, request_id: str) -> str:
        """The request is over: the rest of its text."""
        stream = self._streams.pop(request_id, None)
        return stream.close() if stream else ""


class _Stream:
    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._detokenizer = tokenizer.detokenizer(
            params.skip_special_tokens,
            params.visible_special_ids or (),
            verbatim=params.structure is not None,  # what a grammar has read must be what the caller gets
        )
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._ready: list[str] = []
        self._stopped = False
        self._min_tokens = params.min_tokens
        # The token that ends a text is no part of it, unless it is asked for.
        self._unspoken = frozenset() if params.include_stop_str_in_output else request.stop_tokens

    def push(self, request: Request, token: int) -> str | None:
        if token in self._unspoken:
            return None
        text = self._detokenizer.push(token)
        if request.num_output < self._min_tokens:
            self._ready.append(text)  # too early to stop
            return None
        emitted, matched = self._stops.push(text)
        self._ready.append(emitted)
        self._stopped = matched is not None
        return matched

    def take(self) -> str:
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def close(self) -> str:
        if not self._stopped:
            emitted, _ = self._stops.push(self._detokenizer.flush())
            self._ready += [emitted, self._stops.flush()]
        return self.take()
