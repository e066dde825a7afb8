"""The requests that were submitted to the engine and are not finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from chairlift.server.process.messages import Update
from chairlift.server.process.stream import UpdateStream


class OpenRequests:
    """The streams of open completions, and how many sequences the engine has for each tenant."""

    def __init__(self) -> None:
        self._streams: dict[str, UpdateStream] = {}  # by completion id, in order of submission
        self._sequences: Counter[str] = Counter()  # by tenant

    @property
    def num_sequences(self) -> int:
        return self._sequences.total()

    @property
    def sequences_by_tenant(self) -> Mapping[str, int]:
        return self._sequences

    def streams(self) -> Iterable[UpdateStream]:
        """Return every stream once, in order of submission."""
        return dict.fromkeys(self._streams.values())

    def get(self, completion_id: str) -> UpdateStream | None:
        return self._streams.get(completion_id)

    def add(self, stream: UpdateStream) -> None:
        for one_id in stream.ids:
            self._streams[one_id] = stream
            self._sequences[stream.tenant] += stream.sequences[one_id]

    def deliver(self, update: Update) -> UpdateStream | None:
        """Give an update to its stream and return it; None if it was cancelled before."""
        stream = self._streams.get(update.request_id)
        if stream is not None:
            stream.push(update)
            if update.finish_reason is not None:
                self._close(update.request_id)
        return stream

    def remove(self, stream: UpdateStream) -> None:
        for one_id in stream.ids:
            if one_id in self._streams:
                self._close(one_id)

    def remove_all(self) -> list[UpdateStream]:
        """Return all streams, which are no longer open."""
        streams = list(self.streams())
        self._streams.clear()
        self._sequences.clear()
        return streams

    def _close(self, completion_id: str) -> None:
        stream = self._streams.pop(completion_id)
        self._sequences[stream.tenant] -= stream.sequences[completion_id]
        if not self._sequences[stream.tenant]:
            del self._sequences[stream.tenant]
