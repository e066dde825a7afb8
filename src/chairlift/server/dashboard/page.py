"""The dashboard page as a single file, which also works without a server, and files of recorded runs for it.

The scripts under `web/` are ordinary modules, which are joined into one. A module's imports must be at its beginning,
one per line, and all modules share one namespace, so no two may declare the same name.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from chairlift.errors import InvalidParameter

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)
_SCRIPT = re.compile(r'<script type="module">(.*?)</script>', re.DOTALL)


def dashboard_page(recording: bytes | None = None) -> str:
    """Return the page. With an embedded recording, it plays the recording and needs no server."""
    page = _page("index.html", "main")
    if recording is None:
        return page
    data = base64.b64encode(recording).decode()
    return page.replace('id="recording">', f'id="recording">{data}', 1)


def fleet_page() -> str:
    """Return the page of a fleet, with a lift for each replica."""
    return _page("fleet.html", "fleet")


@cache
def _page(document: str, entry: str) -> str:
    page = _read(document).replace("/* style */", _read("style.css"), 1).replace("<!-- chat -->", _read("chat.html"), 1)
    return page.replace("/* script */", joined_modules(entry), 1)


def joined_modules(entry: str) -> str:
    """Return `entry` and all modules it imports, each once and after its imports."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in parts:
            source = _read(f"{name}.js")
            for needed in _IMPORT.findall(source):
                add(needed)
            parts[name] = _EXPORT.sub("", _IMPORT.sub("", source))

    add(entry)
    return "\n".join(f"// ---- {name}.js\n{source}" for name, source in parts.items())


def content_policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the page's own script and server."""
    script = _SCRIPT.search(page)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    rules = {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _read(name: str) -> str:
    return (files("chairlift.server.dashboard") / "web" / name).read_text(encoding="utf-8")


SUFFIXES = (".lift", ".html")


@dataclass(frozen=True, slots=True)
class RunSummary:
    steps: int
    requests: int
    seconds: float
    lost: int  # frames dropped because the client read too slowly
    has_keyframe: bool  # Nothing can be drawn without one.

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> RunSummary:
        steps, lost, has_keyframe, requests, times = 0, 0, False, set[str](), list[float]()
        for line in lines:
            frame = json.loads(line)
            steps += len(frame.get("steps", ()))
            requests.update(given[1] for given in (*frame.get("new", ()), *frame.get("requests", ())))
            has_keyframe |= frame["t"] == "key"
            if "now" in frame:
                times.append(frame["now"])
            if frame["t"] == "lost":
                lost = frame["frames"]
        return cls(steps, len(requests), times[-1] - times[0] if times else 0.0, lost, has_keyframe)


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise InvalidParameter("out", f"must end in {' or '.join(SUFFIXES)}, got {path.name!r}")


def write_run(path: Path, lines: Sequence[bytes]) -> None:
    """Write a `.lift` file, which the page can open, or an `.html` file, which is the page with the run embedded."""
    check_suffix(path)
    data = compress(lines)
    if path.suffix == ".html":
        path.write_text(dashboard_page(data), encoding="utf-8")
    else:
        path.write_bytes(data)


def compress(lines: Sequence[bytes]) -> bytes:
    return gzip.compress(b"".join(line + b"\n" for line in lines), mtime=0)
