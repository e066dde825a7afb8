"""All topics, in the order in which they are best read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift.lab.explain.topic import Topic

ALL = "all"
# Each is a module in `topics` with a value TOPIC; imported when asked for.
TOPICS = (
    "attention",
    "masks",
    "cache",
    "budget",
    "batching",
    "kernels",
    "chunking",
    "paging",
    "prefix",
    "heads",
    "flash",
    "cost",
    "speculation",
)


def topic_named(name: str) -> Topic:
    if name not in TOPICS:
        raise InvalidParameter("topic", f"there is no {name!r}; choose from {', '.join((*TOPICS, ALL))}")
    topic: Topic = import_module(f"chairlift.lab.explain.topics.{name}").TOPIC
    return topic


def topics_named(name: str) -> list[Topic]:
    """One, or with "all" the whole guide."""
    return [topic_named(known) for known in TOPICS] if name == ALL else [topic_named(name)]
