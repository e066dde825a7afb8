"""Numbers that stand for tenants in frames."""

from __future__ import annotations

MOST_REMEMBERED = 1000


class TenantNumbers:
    """Clients may call themselves anything, so only those seen last are remembered.

    One that was forgotten and comes back gets a new number. A number is never given to anyone else: pages add up by
    name, and what they know of the old number stays true. A name is told once and then with keyframes only, so pages
    must remember at least as many.
    """

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._numbers: dict[str, int] = {}  # the one seen last comes last
        self._next = 0
        self._untold: dict[int, str] = {}

    def number_of(self, name: str) -> int:
        number = self._numbers.pop(name, None)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._untold[number] = name
            if len(self._numbers) >= self._most:
                del self._numbers[next(iter(self._numbers))]
        self._numbers[name] = number
        return number

    def take_untold(self) -> dict[int, str]:
        """The names behind the numbers that were given since this was last asked."""
        found, self._untold = self._untold, {}
        return found

    def take_all(self) -> dict[int, str]:
        """All that are remembered; and those given just now, even if there were too many to remember."""
        return {number: name for name, number in self._numbers.items()} | self.take_untold()
