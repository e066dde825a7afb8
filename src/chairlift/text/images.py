"""Images in conversations: taken out of the messages, which keep a mark in the place of each.

Dialects whose messages are text put `image_mark` there, which carries the image's source. A chat template gets messages
whose content is a list of parts, and writes a token of its own for each image.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chairlift.errors import InvalidParameter

_NONCE = secrets.token_hex(8)  # so that no text has a mark by chance
_CARRIED = re.compile(f"\ue000{_NONCE}-image-([^|]*)\\|([^\ue001]*)\ue001")
_URL = re.compile(r"https?://|data:[^,]*;base64,", re.IGNORECASE)
_KEYS = {"image_url": "image_url", "input_image": "image_url", "image": "image", "image_pil": "image_pil"}
TEXT_ONLY = "this model reads text only"
_OTHER_KINDS = {
    **dict.fromkeys(("video", "video_url", "input_video"), "videos are not read; send pictures of it as images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sound is not read"),
}


def image_mark(location: str, source: str) -> str:
    """What stands for an image in a text; `location` names it in errors. Raises for what is no URL of an image."""
    if not _URL.match(source[:300]) or "\ue001" in source:
        raise InvalidParameter(location, "must be a data URL in base64, or an http or https URL")
    return f"\ue000{_NONCE}-image-{location}|{source}\ue001"


@dataclass(slots=True)
class ChatImages:
    """The images of one conversation, in order, and what a prompt has in their place."""

    sources: list[Any] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    marker: str = ""  # what the chat template writes for an image
    replacements: Sequence[str] = ()  # what the prompt has instead
    _mark: str = field(default_factory=lambda: f"\ue000{secrets.token_hex(8)}-image\ue001")

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], ChatImages]:
        """The messages with a mark in place of each image, and the images."""
        images = cls()
        return [images._without_images(f"messages[{i}]", message) for i, message in enumerate(messages)], images

    def _without_images(self, name: str, message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and _NONCE in content:
            return {**message, "content": _CARRIED.sub(self._take_carried, content)}
        if not isinstance(content, Sequence) or isinstance(content, str | bytes):
            return message
        parts = [self._part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
        return {**message, "content": parts}

    def _take_carried(self, carried: re.Match[str]) -> str:
        return self._take(carried[1], carried[2])

    def _part(self, name: str, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _OTHER_KINDS:
            raise InvalidParameter(name, _OTHER_KINDS[str(kind)])
        if kind not in _KEYS:
            return part
        source = part.get(_KEYS[str(kind)])
        if kind == "image" and source is None:
            source = anthropic_url(f"{name}.source", part.get("source"))
        if isinstance(source, Mapping):
            source = source.get("url")
        if source is None:
            raise InvalidParameter(f"{name}.{_KEYS[str(kind)]}", "is missing")
        return {"type": "text", "text": self._take(name, source)}

    def _take(self, location: str, source: Any) -> str:
        self.sources.append(source)
        self.locations.append(location)
        return self._mark

    def refuse(self, problem: str = TEXT_ONLY) -> None:
        """Raise, naming the first one, for what reads none."""
        raise InvalidParameter(self.locations[0], problem)

    def shown(self, messages: Sequence[dict[str, Any]], *, as_parts: bool) -> list[dict[str, Any]]:
        """The messages for a chat template: contents with images, and with `as_parts` all, are lists of parts."""
        return [
            {**message, "content": self._parts(message["content"])}
            if isinstance(message.get("content"), str) and (as_parts or self._mark in message["content"])
            else message
            for message in messages
        ]

    def _parts(self, content: str) -> list[dict[str, str]]:
        # Parts of a message were joined by line breaks, which are none of its text.
        texts = re.split(f"\n?{self._mark}\n?", content)
        parts: list[dict[str, str]] = []
        for number, text in enumerate(texts):
            parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        return parts or [{"type": "text", "text": ""}]

    def expander(self) -> Callable[[str], str]:
        """What puts the replacement of each image in the place of the template's marker, piece by piece."""
        replacements = iter(self.replacements)

        def expand(piece: str) -> str:
            if not self.sources:
                return piece
            parts = piece.split(self.marker)
            expanded = parts[0]
            for part in parts[1:]:
                replacement = next(replacements, None)
                if replacement is None:
                    raise InvalidParameter("messages", f"the chat template wrote {self.marker!r} too often")
                expanded += replacement + part
            return expanded

        return expand


def anthropic_url(name: str, source: Any) -> str:
    """The source of an image in Anthropic's form as a URL."""
    if not isinstance(source, Mapping):
        raise InvalidParameter(name, "must be an object with a type")
    kind = source.get("type")
    if kind == "base64":
        data, media_type = source.get("data"), source.get("media_type")
        if not isinstance(data, str) or not isinstance(media_type, str):
            raise InvalidParameter(name, "must have media_type and data")
        return f"data:{media_type};base64,{data}"
    if kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    raise InvalidParameter(f"{name}.type", f"must be base64 or url, got {str(kind)[:40]!r}")
