"""Turns tokens into text as they are generated, and finds stop strings."""

from __future__ import annotations

from chairlift.core.request import Request
from chairlift.text.stop_strings import StopStrings
from chairlift.text.tokenizer import Tokenizer


class OutputText:
    """The text of every open request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}

    def open(self, request: Request) -> None:
        if request.params.detokenize:
            self._streams[request.id] = _Stream(self._tokenizer, request)

    def push(self, request: Request, token: int) -> str | None:
        """Add a token just appended to `request`; return the stop string that it completes, if any."""
        stream = self._streams.get(request.id)
        return stream.push(request, token) if stream else None

    def take(self, request_id: str) -> str:
        """The text since the last call that cannot become part of a stop string."""
        stream = self._streams.get(request_id)
        return stream.take() if stream else ""

    def close(self, request_id: str) -> str:
        """Forget a finished request; return the rest of its text."""
        stream = self._streams.pop(request_id, None)
        return stream.close() if stream else ""


class _Stream:
    """The text of one request."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._detokenizer = tokenizer.detokenizer(
            params.skip_special_tokens,
            params.visible_special_ids or (),
            verbatim=params.structure is not None,  # the caller gets exactly the text that the grammar matched
        )
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._ready: list[str] = []
        self._stopped = False
        self._min_tokens = params.min_tokens
        # The token that ends a text is not part of it, unless the request asks for it.
        self._hidden_tokens = frozenset() if params.include_stop_str_in_output else request.stop_tokens

    def push(self, request: Request, token: int) -> str | None:
        if token in self._hidden_tokens:
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
