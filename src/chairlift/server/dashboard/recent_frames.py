"""Cache of the last keyframe and the frames after it, with which new pages start."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.server.process.messages import DashboardFrame

MAX_UNREAD = 50  # frames that a page may leave unread; there are about ten per second
MAX_FRAMES = MAX_UNREAD // 2 - 1  # leaves a page that gets all of these room for as many more
MAX_BYTES = 2**20  # total size of the frames after the keyframe


class RecentFrames:
    def __init__(self) -> None:
        self._frames: list[DashboardFrame] = []  # starts with a keyframe; empty if there is none or it is too old
        self._size = 0

    def add(self, frame: DashboardFrame) -> None:
        if frame.is_key:
            self._frames, self._size = [frame], 0
        elif self._frames:
            self._frames.append(frame)
            self._size += len(frame.json)
            if len(self._frames) > MAX_FRAMES or self._size > MAX_BYTES:
                self.clear()

    def clear(self) -> None:
        self._frames, self._size = [], 0

    def all(self) -> Sequence[DashboardFrame]:
        return self._frames
