"""A topic of the guide: its run, its pictures and its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from chairlift_lab.explain.palette import Theme
from chairlift_lab.explain.sheet import Sheet
from chairlift_lab.explain.topic_engines import TopicEngines


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture: `draw` takes a run's data and a theme; `says` is its alternative text."""

    name: str
    draw: Callable[[Any, Theme], Sheet]
    says: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Topic:
    """A subject: what is run, how it is drawn, and its text.

    `teach` returns Markdown in which a line `[[name]]` stands for the picture of that name.
    """

    name: str
    title: str
    question: str  # what the topic answers
    run: Callable[[TopicEngines], Any]
    pictures: tuple[Picture, ...]
    teach: Callable[[Any], str]
    code: tuple[str, ...]  # source files to read

    @property
    def command(self) -> str:
        return f"chairlift explain {self.name} --out guide"


def as_json(value: Any) -> Any:
    """A run's data as JSON values; dataclasses carry their type name."""
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__} | own
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(entry) for entry in value]
    return value
