"""All topics, in the order in which they are best read."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from chairlift.errors import InvalidParameter

if TYPE_CHECKING:
    from chairlift_lab.explain.topic import Topic

ALL = "all"
# Each is a module in `topics` with a value TOPIC, imported on use.
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
    topic: Topic = import_module(f"chairlift_lab.explain.topics.{name}").TOPIC
    return topic


def topics_named(name: str) -> list[Topic]:
    """The topic called `name`, or all of them for "all"."""
    return [topic_named(known) for known in TOPICS] if name == ALL else [topic_named(name)]
