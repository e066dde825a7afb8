"""Classes of service: the targets that a request has by its service_tier, by its API key or by a header."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chairlift.core.budgets.base import BUDGETS
from chairlift.core.orderings.base import ORDERINGS
from chairlift.core.targets import ServiceClass, parse_classes
from chairlift.errors import InvalidParameter

CLASS_HEADER = "x-chairlift-class"
DEFAULT_CLASS = "default"  # If there is a class of this name, requests that choose none have it.
OWN_TARGETS = "own"  # The label in metrics of requests with targets of their own.
_NO_CHOICE = frozenset({"auto", DEFAULT_CLASS, "standard_only"})  # The service_tier of clients that choose none.
# Tiers of other services. Without classes there is one tier, which serves all of them.
_OTHER_TIERS = frozenset({"flex", "scale", "priority", "fast", "ultrafast"})


@dataclass(frozen=True, slots=True)
class ServiceClasses:
    """The classes of a server, by name."""

    by_name: Mapping[str, ServiceClass] = field(default_factory=dict)

    @classmethod
    def of(cls, declared: Iterable[str], order: str, budget: str | None) -> ServiceClasses:
        """Check what `--class` declares; `order` and `budget` are those of the engine."""
        classes = parse_classes(declared)
        for name, each in classes.items():
            if name in (OWN_TARGETS, *(_NO_CHOICE - {DEFAULT_CLASS})):
                raise InvalidParameter("classes", f"{name!r} has a meaning of its own; take another name")
            if each.share != 1.0:
                raise InvalidParameter("classes", f"the share of {name!r} is for simulations; leave it out")
        ordering = ORDERINGS.get(order)
        used_budget = budget or ordering.own_budget
        has_effect = ordering.uses_targets or (used_budget is not None and BUDGETS.get(used_budget).uses_targets)
        if classes and not has_effect:
            problem = f"have no effect with order {order!r}"
            raise InvalidParameter("classes", f"{problem}; start with --order slack or edf, or --budget slack")
        return cls(classes)

    def choose(self, header: str | None, tier: str | None, key_class: str | None) -> ServiceClass | None:
        """The class of a request, from the first that names one: the header, its service_tier, its API key."""
        if header is not None:
            return self._named("header", CLASS_HEADER, header)
        if tier is not None and tier not in _NO_CHOICE and (self.by_name or tier not in _OTHER_TIERS):
            return self._named("service_tier", "service_tier", tier)
        if key_class:
            return self._named("api_key", "the class of this API key", key_class)
        return self.by_name.get(DEFAULT_CLASS)

    def check_key_class(self, parameter: str, key_class: str) -> None:
        """Raise if the keys of a server name a class that it does not have."""
        if key_class:
            self._named(parameter, "the class of an API key", key_class)

    def _named(self, parameter: str, what: str, name: str) -> ServiceClass:
        found = self.by_name.get(name)
        if found is None:
            known = f"choose from {', '.join(self.by_name)}" if self.by_name else "this server has no classes (--class)"
            raise InvalidParameter(parameter, f"{what} names an unknown class, {name!r:.80}; {known}")
        return found
