"""Numbers that stand for tenants in frames."""

from __future__ import annotations

MAX_TENANTS = 1000


class TenantNumbers:
    """Assigns numbers to tenants and keeps the most recent ones, since clients may send any name.

    A tenant that was dropped and returns gets a new number. Numbers are never reused: pages aggregate by name, so old
    numbers stay valid. A name is sent once, and then only with keyframes, so pages must keep at least as many names.
    """

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._numbers: dict[str, int] = {}  # ordered by last use
        self._next = 0
        self._unsent: dict[int, str] = {}

    def number_of(self, name: str) -> int:
        number = self._numbers.pop(name, None)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._unsent[number] = name
            if len(self._numbers) >= self._max_tenants:
                del self._numbers[next(iter(self._numbers))]
        self._numbers[name] = number
        return number

    def take_unsent(self) -> dict[int, str]:
        """Return the names of the numbers assigned since the last call."""
        names, self._unsent = self._unsent, {}
        return names

    def take_all(self) -> dict[int, str]:
        """Return the names of all kept numbers, and of those assigned since the last call."""
        return {number: name for name, number in self._numbers.items()} | self.take_unsent()
