"""The topics of the guide, and the files that are written of each: pictures, a Markdown page, and the run's data.

The page of a topic is `pages/NAME.md`: a title, a question, and a text with pictures and the figures of a run in
braces: `{data.steps}`, `{data.steps!n}` for how many there are, or `{data.steps!t}` for their total.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from string import Formatter
from textwrap import fill
from typing import TYPE_CHECKING, Any

from chairlift.errors import InvalidParameter
from chairlift.progress import Note
from chairlift_lab.explain.drawing import Sheet

if TYPE_CHECKING:
    from chairlift_lab.explain.recording import TopicEngines

ALL = "all"
# In the order in which they are best read. Each is a class of that name in a module of `topics`, imported on use.
TOPICS = {
    "attention": "attention",
    "masks": "masks",
    "cache": "memory",
    "budget": "steps",
    "batching": "steps",
    "kernels": "masks",
    "chunking": "steps",
    "paging": "memory",
    "prefix": "memory",
    "heads": "attention",
    "flash": "flash",
    "cost": "speed",
    "speculation": "speed",
}
FORMATS = ("png", "svg", "json", "md")
LINE = 120
PAGES = Path(__file__).parent / "pages"


class Topic(ABC):
    """A subject: what is run, how it is drawn, and the figures of a run that its page has beside `data`."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @abstractmethod
    def run(self, engines: TopicEngines) -> Any:
        """Run the engine for this topic, and return the run's data."""

    @abstractmethod
    def draw(self, data: Any) -> Sheet:
        """Draw the picture of this name."""

    @property
    def pictures(self) -> Mapping[str, Callable[[Any], Sheet]]:
        return {self.name: self.draw}

    @abstractmethod
    def figures(self, data: Any) -> Mapping[str, Any]: ...

    @property
    def text(self) -> str:
        return (PAGES / f"{self.name}.md").read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        return blocks(self.text)[0].removeprefix("# ")

    @property
    def question(self) -> str:
        return blocks(self.text)[1].strip("*")

    @property
    def command(self) -> str:
        return f"chairlift explain {self.name} --out guide"

    def filled(self, data: Any, model: str = "") -> str:
        """The text with the figures of a run."""
        return _Filler().format(self.text, data=data, model=model, **self.figures(data))


class _Filler(Formatter):
    """Fills figures into a page, with two conversions of its own."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        own: Mapping[str | None, Callable[[Any], Any]] = {"n": len, "t": sum}
        return own[conversion](value) if conversion in own else super().convert_field(value, conversion)


@cache
def topic_named(name: str) -> Topic:
    if name not in TOPICS:
        raise InvalidParameter("topic", f"there is no {name!r}; choose from {', '.join((*TOPICS, ALL))}")
    topic: Topic = getattr(import_module(f"chairlift_lab.explain.topics.{TOPICS[name]}"), name.capitalize())()
    return topic


def parse_formats(text: str) -> list[str]:
    """ "png,md" -> ["png", "md"]."""
    formats = [part.strip() for part in text.split(",") if part.strip()]
    for unknown in [name for name in formats if name not in FORMATS] or ([""] if not formats else []):
        raise InvalidParameter("formats", f"there is no {unknown!r}; choose from {', '.join(FORMATS)}")
    return formats


def write_guide(
    name: str, engines: TopicEngines, out: Path, formats: Sequence[str], *, note: Note = lambda text: None
) -> list[Path]:
    """Run and draw a topic, or with "all" every topic and the index page; returns the files."""
    from chairlift_lab.explain.recording import one_thread

    topics, written = [topic_named(each) for each in (TOPICS if name == ALL else (name,))], list[Path]()
    for number, topic in enumerate(topics, start=1):
        note(f"{number}/{len(topics)} {topic.name}: running")
        with one_thread():
            data = topic.run(engines)
        note(f"{number}/{len(topics)} {topic.name}: drawing")
        written += write_topic(topic, data, engines.model_name, out, formats)
    if name == ALL and "md" in formats:
        written.append(_write(out / "README.md", _index(topics)))
    return written


def write_topic(topic: Topic, data: Any, model: str, out: Path, formats: Sequence[str]) -> list[Path]:
    """Write the files of a topic after its run; pictures are drawn once for all formats."""
    sheets, written = {name: draw(data) for name, draw in topic.pictures.items()}, []
    for sheet in sheets.values():
        sheet.finish(f"{model} · {topic.command}")
    for suffix in (suffix for suffix in ("png", "svg") if suffix in formats):
        for name, sheet in sheets.items():
            written.append(out / f"{name}.{suffix}")
            sheet.save(written[-1])
    if "json" in formats:
        drawn = {name: sheet.drawn for name, sheet in sheets.items()}
        values = {"topic": topic.name, "model": model, "drawn": drawn, "data": as_json(data)}
        written.append(_write(out / f"{topic.name}.json", json.dumps(values, indent=1, ensure_ascii=False) + "\n"))
    if "md" in formats:
        written.append(_write(out / f"{topic.name}.md", page(topic, data, model)))
    return written


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def page(topic: Topic, data: Any, model: str) -> str:
    """The Markdown page of a run: with its figures, its pictures, and links to the topics before and after it."""
    before, after = neighbours(topic)
    links = [f"← [{before.title}]({before.name}.md)"] if before else []
    links += ["[All topics](README.md)"]
    links += [f"[{after.title}]({after.name}.md) →"] if after else []
    return f"{to_markdown(topic.filled(data, model), topic.command)}\n\n{' · '.join(links)}\n"


def neighbours(topic: Topic) -> tuple[Topic | None, Topic | None]:
    around = [None, *map(topic_named, TOPICS), None]
    index = around.index(topic)
    return around[index - 1], around[index + 1]


def blocks(text: str) -> list[str]:
    """Paragraphs, headings, lists, tables and pictures, which blank lines separate."""
    return [block.strip() for block in re.split(r"\n\s*\n", text.strip())]


def to_markdown(text: str, command: str) -> str:
    """Wrap lines again after figures were filled in, and show below each picture the command that draws it."""
    parts = (
        f"{block}\n\n```bash\n{command}\n```" if block.startswith("![") else _wrapped(block) for block in blocks(text)
    )
    return "\n\n".join(parts)


def _wrapped(block: str) -> str:
    if block.startswith(("```", "#", "|", "The code behind it:")):
        return block
    if re.match(r"(-|\d+\.) ", block) is None:
        return _fill(block, "")
    entries = re.split(r"\n(?=-|\d+\. )", block)
    return "\n".join(_fill(entry, " " * (entry.index(" ") + 1)) for entry in entries)


def _fill(text: str, indent: str) -> str:
    words = " ".join(text.split())
    return fill(words, LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _index(topics: Sequence[Topic]) -> str:
    rows = "\n".join(f"| [{topic.title}]({topic.name}.md) | {topic.question} |" for topic in topics)
    return (PAGES / "README.md").read_text(encoding="utf-8").format(rows=rows, all=ALL)


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
