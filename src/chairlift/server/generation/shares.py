"""Shares of tenants in what the front end can hold at once, so that no tenant takes all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MOST_OVER_LIMIT = 2  # times a limit that tenants may use together by claiming their shares


def share_of(tenant: str, limit: float, using: Mapping[str, int], weights: Mapping[str, float]) -> float:
    """Return a tenant's share of `limit`, by weight, among the tenants that are using some of it and itself."""
    total = sum(weights.get(one, 1.0) for one in using.keys() | {tenant})
    return limit * weights.get(tenant, 1.0) / total


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
        return self._using[tenant] + amount <= share_of(tenant, self._limit, self._using, self._weights)

    def take(self, tenant: str, amount: int) -> None:
        self._using[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self._using[tenant] -= amount
        if not self._using[tenant]:
            del self._using[tenant]
