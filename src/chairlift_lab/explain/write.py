"""Writes the files of a topic."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift_lab.explain.page import index_page, topic_page
from chairlift_lab.explain.palette import LIGHT, THEMES
from chairlift_lab.explain.registry import ALL, TOPICS, topic_named
from chairlift_lab.explain.sheet import Sheet
from chairlift_lab.explain.topic import Topic, as_json
from chairlift_lab.explain.topic_engines import TopicEngines, one_thread
from chairlift_lab.explain.words import to_markdown

FORMATS = ("png", "svg", "html", "json", "md")
DEFAULT_FORMATS = ("png", "svg", "html", "json")
THUMBNAIL_DPI = 55
PAGE_DPI = 150  # pictures on a page are as wide as the text

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Told:
    """A topic after its run."""

    topic: Topic
    data: Any
    model: str
    drawn: dict[str, dict[str, Sheet]] = field(default_factory=dict)  # by theme; drawn once, saved in several formats

    def sheets(self, theme: str = LIGHT.name) -> dict[str, Sheet]:
        if theme not in self.drawn:
            self.drawn[theme] = {
                picture.name: picture.draw(self.data, THEMES[theme]) for picture in self.topic.pictures
            }
            for sheet in self.drawn[theme].values():
                sheet.sign(f"{self.model} · {self.topic.command}")
        return self.drawn[theme]

    def png(self, picture: str, theme: str, *, dpi: int = PAGE_DPI) -> bytes:
        buffer = BytesIO()
        self.sheets(theme)[picture].save(buffer, dpi=dpi)
        return buffer.getvalue()

    def alts(self) -> dict[str, str]:
        return {picture.name: picture.says(self.data) for picture in self.topic.pictures}


def parse_formats(text: str) -> list[str]:
    """ "png,md" -> ["png", "md"]."""
    formats = [part.strip() for part in text.split(",") if part.strip()]
    for unknown in [one for one in formats if one not in FORMATS] or ([""] if not formats else []):
        raise InvalidParameter("formats", f"there is no {unknown!r}; choose from {', '.join(FORMATS)}")
    return formats


def make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameter("out", f"cannot make the folder {str(path)!r} ({error.strerror})") from None
    return path


def write_guide(
    topics: Sequence[Topic], engines: TopicEngines, out: Path, formats: Sequence[str], *, note: Note = lambda text: None
) -> list[Path]:
    """Run and draw every topic, and write the index page if all are there; returns the files."""
    told, written = [], []
    for place, topic in enumerate(topics):
        note(f"{place + 1}/{len(topics)} {topic.name}: running")
        with one_thread():
            one = Told(topic, topic.run(engines), engines.model_name)
        note(f"{place + 1}/{len(topics)} {topic.name}: drawing")
        written += write_topic(one, out, formats)
        told.append(one)
    if len(topics) == len(TOPICS):
        written += _write_index(told, out, formats)
    return written


def write_topic(told: Told, out: Path, formats: Sequence[str]) -> list[Path]:
    name, written = told.topic.name, []

    def write(suffix: str, text: str) -> None:
        path = out / f"{name}.{suffix}"
        path.write_text(text, encoding="utf-8")
        written.append(path)

    for suffix in ("png", "svg"):
        if suffix in formats:
            for picture, sheet in told.sheets().items():
                path = out / f"{picture}.{suffix}"
                sheet.save(path, kind=suffix)
                written.append(path)
    if "json" in formats:
        drawn = {picture: sheet.drawn for picture, sheet in told.sheets().items()}
        values = {"topic": name, "model": told.model, "drawn": drawn, "data": as_json(told.data)}
        write("json", json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    if "html" in formats:
        text = told.topic.teach(told.data)
        images = {
            picture.name: {theme: told.png(picture.name, theme) for theme in THEMES} for picture in told.topic.pictures
        }
        page = topic_page(told.topic, text, images, told.alts(), told.model, neighbours(told.topic))
        write("html", page)
    if "md" in formats:
        write("md", markdown_page(told))
    return written


def neighbours(topic: Topic) -> tuple[Topic | None, Topic | None]:
    names = list(TOPICS)
    place = names.index(topic.name)
    before = topic_named(names[place - 1]) if place else None
    after = topic_named(names[place + 1]) if place + 1 < len(names) else None
    return before, after


def markdown_page(told: Told) -> str:
    topic, alts = told.topic, told.alts()

    def picture(name: str) -> str:
        return f"![{alts[name]}]({name}.png)\n\n```\n{topic.command}\n```"

    before, after = neighbours(topic)
    links = [f"← [{before.title}]({before.name}.md)"] if before else []
    links += ["[All topics](README.md)"]
    links += [f"[{after.title}]({after.name}.md) →"] if after else []
    code = ", ".join(f"`{place}`" for place in topic.code)
    return (
        f"# {topic.title}\n\n*{topic.question}*\n\n{to_markdown(topic.teach(told.data), picture)}\n\n"
        f"The code behind it: {code}. Drawn from a run of `{told.model}`.\n\n{' · '.join(links)}\n"
    )


def _write_index(told: Sequence[Told], out: Path, formats: Sequence[str]) -> list[Path]:
    written = []
    topics = [one.topic for one in told]
    if "html" in formats:
        thumbnails = {
            one.topic.name: {theme: one.png(one.topic.pictures[0].name, theme, dpi=THUMBNAIL_DPI) for theme in THEMES}
            for one in told
        }
        path = out / "index.html"
        path.write_text(index_page(topics, thumbnails, told[0].model), encoding="utf-8")
        written.append(path)
    if "md" in formats:
        path = out / "README.md"
        path.write_text(_markdown_index(topics), encoding="utf-8")
        written.append(path)
    return written


def _markdown_index(topics: Sequence[Topic]) -> str:
    rows = "\n".join(f"| [{topic.title}]({topic.name}.md) | {topic.question} |" for topic in topics)
    return f"""# The visual guide

How a server for language models works, in pictures. Nothing here is drawn by hand: each picture is made from what the
engine did in a run, and can be made again with one command.

| topic | what you will see |
|---|---|
{rows}

The whole guide as web pages (pictures inside, light and dark) with the data of every run:

```
chairlift explain {ALL} --out guide
```

These Markdown pages and their pictures:

```
chairlift explain {ALL} --out docs/guide --formats md,png
```

`tests/lab/explain` checks what each picture shows against the events of the run that it was drawn from.
"""
