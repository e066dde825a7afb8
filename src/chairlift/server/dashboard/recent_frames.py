"""The last keyframe and all that came after it: a page that comes now begins there, and costs the engine nothing."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.server.process.messages import Frame

MAX_UNREAD = 50  # frames that a page may leave unread, of which there are about ten a second
MOST_FRAMES = MAX_UNREAD // 2 - 1  # so that a page that was just told all of these has room for as many more
MOST_BYTES = 2**20  # of those after the keyframe


class RecentFrames:
    def __init__(self) -> None:
        self._frames: list[Frame] = []  # the first one is a keyframe; empty if there is none, or it is too old
        self._size = 0

    def add(self, frame: Frame) -> None:
        if frame.is_key:
            self._frames, self._size = [frame], 0
        elif self._frames:
            self._frames.append(frame)
            self._size += len(frame.json)
            if len(self._frames) > MOST_FRAMES or self._size > MOST_BYTES:
                self.clear()

    def clear(self) -> None:
        self._frames, self._size = [], 0

    def all(self) -> Sequence[Frame]:
        return self._frames
