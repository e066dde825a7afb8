"""Shares of tenants in what the front end can hold at once, so that no tenant takes all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

MOST_OVER_LIMIT = 2  # times a limit that tenants may use together by claiming their shares


def shares_of(limit: float, tenants: Collection[str], weights: Mapping[str, float]) -> dict[str, float]:
    """Divide `limit` among the tenants by weight."""
    total = sum(weights.get(one, 1.0) for one in tenants)
    return {one: limit * weights.get(one, 1.0) / total for one in tenants}


class SharedLimit:
    """A limit on what all tenants use together. Beyond it, a tenant may still use its share, up to twice the limit."""

    def __init__(self, limit: int, weights: Mapping[str, float] | None = None) -> None:
        self._limit = limit
        self._weights = weights or {}
        self._using: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._using.total()

    def has_room(self, tenant: str, amount: int) -> bool:
        if self.total + amount <= self._limit:
            return True
        if self.total + amount > MOST_OVER_LIMIT * self._limit:
            return False
        shares = shares_of(self._limit, self._using.keys() | {tenant}, self._weights)
        return self._using[tenant] + amount <= shares[tenant]

    def take(self, tenant: str, amount: int) -> None:
        self._using[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self._using[tenant] -= amount
        if not self._using[tenant]:
            del self._using[tenant]
