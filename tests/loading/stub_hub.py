"""A Hugging Face hub with one model, on a socket of this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Downloads(list[str]):
    """The paths that were downloaded, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int]] = []  # the path and the first byte of those that were continued


@contextmanager
def stub_hub(
    repository: str,
    files: Mapping[str, bytes],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    gated: bool = False,
    sums: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    broken_after: int | None = None,
) -> Iterator[Downloads]:
    """Serve the files of a repository to huggingface_hub; yields the paths that were downloaded, in order.

    `gated`: files are only for those who have accepted a licence. `sums` and `sizes` are stated instead of the true
    ones. `broken_after`: a connection breaks after so many bytes of a file of weights.
    """
    from huggingface_hub import constants

    downloaded: Downloads = Downloads()
    ranges = downloaded.ranges

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            file = next((name for name in files if path.startswith(f"/{repository}/resolve/") and self._is(name)), None)
            if path.startswith(f"/api/models/{repository}/tree/"):
                entries = [_entry(name, content, sums or {}, sizes or {}) for name, content in files.items()]
                self._answer(json.dumps(entries).encode())
            elif path.startswith(f"/api/models/{repository}"):
                self._answer(json.dumps({"id": repository, "sha": COMMIT}).encode())
            elif gated:
                self._answer(b"", 403, "GatedRepo")
            elif file is not None:
                downloaded.extend([file] if self.command == "GET" else [])
                self._send_file(file)
            else:
                in_repository = path.startswith(f"/{repository}/")
                self._answer(b"", 404, "EntryNotFound" if in_repository else "RepoNotFound")

        def _is(self, name: str) -> bool:
            return self.path.split("/resolve/")[1].partition("/")[2] == name

        def _send_file(self, name: str) -> None:
            content, begin = files[name], 0
            asked = self.headers.get("Range", "")
            if asked.startswith("bytes=") and self.command == "GET":
                begin = int(asked[len("bytes=") :].partition("-")[0])
            ranges.append((name, begin)) if begin else None
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(len(content) - begin))
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            self.send_header("X-Repo-Commit", COMMIT)
            form = hashlib.sha256 if name.endswith(".safetensors") else hashlib.sha1
            self.send_header("ETag", f'"{form(content).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                body = content[begin:]
                if broken_after is not None and name.endswith(".safetensors"):
                    body = body[:broken_after]
                    self.close_connection = True
                self.wfile.write(body)

        def _answer(self, body: bytes, status: int = 200, error: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            if error is not None:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield downloaded
    finally:
        server.shutdown()
        server.server_close()


def _entry(name: str, content: bytes, sums: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, object]:
    size = sizes.get(name, len(content))
    entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(content).hexdigest()}
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": sums.get(name, hashlib.sha256(content).hexdigest()), "size": size, "pointerSize": 1}
    return entry
