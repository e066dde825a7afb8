"""Builds a named choice (a policy, an ordering, a budget) with the options of the config that it declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol, TypeVar

from chairlift.errors import InvalidParameter
from chairlift.registry import Registry


class TakesOptions(Protocol):
    """A class that declares which options of the engine's config its constructor takes as keywords."""

    options: ClassVar[frozenset[str]]


C = TypeVar("C", bound=TakesOptions)


def make_choice(registry: Registry[type[C]], name: str, given: Mapping[str, object], *arguments: object) -> C:
    """Build the choice `name` from `arguments` and those options in `given` that are not None; raise for one that it
    does not take."""
    choice = registry.get(name)
    wanted = {option: value for option, value in given.items() if value is not None}
    for option in wanted:
        if option not in choice.options:
            takes_it = [other for other in registry.names() if option in registry.get(other).options]
            problem = f"only goes with {registry.parameter} {' or '.join(takes_it)}, not {name!r}"
            raise InvalidParameter(option, problem)
    make: Callable[..., C] = choice
    return make(*arguments, **wanted)
