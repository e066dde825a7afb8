"""The phases of an engine's start, and the seconds that each took."""

from __future__ import annotations

import time


class StartTimeline:
    """Phases follow one another without gaps: each begins where the one before has ended."""

    def __init__(self, begun: float | None = None) -> None:
        """`begun`: when the first phase began, by `time.monotonic`; now by default."""
        self.seconds: dict[str, float] = {}  # by phase, in order
        self._last_end = time.monotonic() if begun is None else begun

    def end(self, phase: str) -> None:
        """Count the time since the last phase as `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last_end
        self._last_end = now

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.2f} s: {phases}"
