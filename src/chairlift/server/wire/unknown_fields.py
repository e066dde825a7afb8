"""The rule for fields of a request that no reader of it knows.

A name that resembles one of ours is a typing error and is refused. Any other is ignored and said: the response names it
in a header, and the log names it once per client. With `--unknown-fields refuse` all of them are refused.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import quote

from chairlift.errors import InvalidParameter

log = logging.getLogger("chairlift.server")

HEADER = "x-chairlift-ignored-fields"
MAX_HEADER = 1000  # characters of its value
MAX_NAME = 100  # characters of a field's path in it
MAX_IGNORED = 256  # different fields of one request; others that only differ by an index count as the same
MAX_CLIENTS = 1024  # Their fields were logged; the oldest one is forgotten.
MAX_KNOWN_NAME = 64  # characters; no parameter is longer, so longer names resemble none

# Parameters of other servers, which clients of many servers send, that differ from one of ours by a letter.
_NO_MISSPELLINGS = frozenset({"top_a", "models"})

UnknownFieldsRule = Literal["ignore", "refuse"]


@dataclass(slots=True, eq=False)
class UnknownFields:
    """What the readers of one request have ignored."""

    rule: UnknownFieldsRule
    _paths: dict[str, str] = field(default_factory=dict)  # Those of the ignored fields, by the path without indices.

    def add(self, path: str, name: str, known: Collection[str]) -> None:
        """Ignore the field `name`, or refuse it if it resembles one of the `known`."""
        if _shape(path) in self._paths:
            return
        if name not in _NO_MISSPELLINGS and (meant := resembling(name, known)):
            raise InvalidParameter(path, f"unknown parameter; did you mean {meant!r}?", "unknown_parameter")
        self.ignore(path, "unknown parameter", "unknown_parameter")

    def ignore(self, path: str, reason: str, code: str = "invalid_value") -> None:
        """Ignore the field at `path`, or refuse it for this reason."""
        if _shape(path) in self._paths:
            return
        if self.rule == "refuse":
            raise InvalidParameter(path, reason, code)
        if len(self._paths) == MAX_IGNORED:
            raise InvalidParameter(path, f"is one of more than {MAX_IGNORED} unknown parameters", "unknown_parameter")
        self._paths[_shape(path)] = path

    def say(self, path: str) -> None:
        """Name a known field that has no effect on this model."""
        self._paths.setdefault(path, path)

    def header(self) -> str:
        """Return the paths as the value of a header; other characters than those of names are percent-encoded."""
        kept: list[str] = []
        room = MAX_HEADER - len(", ...")
        for path in self._paths.values():
            # A header may not end in a space, so a field without a name is quoted.
            name = quote(path[:MAX_NAME].encode("utf-8", "replace"), safe="[]") or '""'
            room -= len(name) + len(", ")
            if room < 0:
                return ", ".join([*kept, "..."])
            kept.append(name)
        return ", ".join(kept)


def _shape(path: str) -> str:
    return re.sub(r"\[\d+\]", "", path)


# What the readers of the current request ignore; outside of a server unknown fields are refused.
ignored_fields: ContextVar[UnknownFields | None] = ContextVar("ignored_fields", default=None)


def check_unknown(
    location: str, given: Mapping[str, Any], known: Collection[str], also_known: Collection[str] = ()
) -> None:
    """Apply the rule to the fields of an object at `location`, which is empty for the whole body. A null is absent.

    `also_known` are names that no misspelling is compared with, such as those in a chat template.
    """
    fields: UnknownFields | None = None
    for name, value in given.items():
        if value is not None and name not in known and name not in also_known:
            fields = fields or ignored_fields.get() or UnknownFields("refuse")
            fields.add(f"{location}.{name}" if location else name, name, known)


def say_ignored(path: str) -> None:
    """Name a known field of the request that has no effect on this model."""
    if (fields := ignored_fields.get()) is not None:
        fields.say(path)


def ignore(path: str, reason: str) -> None:
    """Leave out a part of the request that this server cannot do, and name it; it is refused if unknown fields are."""
    (ignored_fields.get() or UnknownFields("refuse")).ignore(path, reason)


def without_unknown(location: str, given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Apply the rule to an object and return its known fields."""
    check_unknown(location, given, known)
    return {name: value for name, value in given.items() if name in known}


def resembling(name: str, known: Iterable[str]) -> str | None:
    """Return the known name of which `name` is a misspelling: one with other case or punctuation, or that differs in
    one letter, in two if it is long."""
    if not 3 <= len(name) <= MAX_KNOWN_NAME:
        return None
    limit = 1 if len(name) < 8 else 2
    near = [(_distance(name, one, limit), one) for one in known if len(one) >= 3]
    return min((one for one in near if one[0] <= limit), default=(0, None))[1]


def _distance(name: str, other: str, limit: int) -> int:
    """Return the letters to insert, delete, replace or swap; more than `limit` if there are more of them."""
    if _letters(name) == _letters(other):
        return 0
    if abs(len(name) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(name, start=1):
        last, before, row = before, row, [i]
        for j, wanted in enumerate(other, start=1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and (name[i - 2], letter) == (wanted, other[j - 2]):
                least = min(least, last[j - 2] + 1)
            row.append(least)
        if min(row) > limit:
            return limit + 1
    return row[-1]


@lru_cache(maxsize=2048)
def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


class IgnoredFieldsLog:
    """Names the ignored fields of each client once."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()  # clients

    def note(self, client: str, names: str) -> None:
        if client in self._logged:
            return
        self._logged[client] = None
        if len(self._logged) > MAX_CLIENTS:
            self._logged.popitem(last=False)
        log.info("the client %.100s sends fields that are ignored, which %s names: %s", client, HEADER, names)
