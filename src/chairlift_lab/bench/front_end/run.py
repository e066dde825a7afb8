"""Streams of a stub engine through servers with different numbers of HTTP processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from chairlift.errors import ChairliftError

_FOLDER = "chairlift_lab.bench.front_end"


@dataclass(frozen=True, slots=True)
class FrontEndSettings:
    model: str  # whose tokenizer the server loads
    streams: int
    tokens: int  # per stream
    tokens_per_s: float  # that the engine generates, of all streams
    readers: int  # processes of the client


@dataclass(frozen=True, slots=True)
class FrontEndPoint:
    """What a server with `workers` HTTP processes delivered."""

    workers: int
    tokens: int
    events: float
    seconds: float  # from the first request to the last byte at the clients

    def row(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "tokens_per_s": self.tokens / self.seconds,
            "events_per_s": self.events / self.seconds,
            "tokens_per_event": self.tokens / self.events,
            "seconds": self.seconds,
        }


def measure_front_end(settings: FrontEndSettings, workers: int) -> FrontEndPoint:
    with _server(settings, workers) as url:
        counts = _split(settings.streams, settings.readers)
        readers = [start_reader(url, count, settings.tokens) for count in counts]
        found = [json.loads(reader.communicate()[0]) for reader in readers]
    if sum(one["complete"] for one in found) != settings.streams:
        raise ChairliftError("some streams were not complete")
    seconds = max(one["last"] for one in found) - min(one["began"] for one in found)
    events = sum(one["events"] for one in found)
    return FrontEndPoint(workers, settings.streams * settings.tokens, events, seconds)


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]


@contextmanager
def _server(settings: FrontEndSettings, workers: int) -> Iterator[str]:
    process = _start("server_process", [settings.model, workers, settings.tokens_per_s])
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise ChairliftError("the server did not start")
        yield url
    finally:
        process.terminate()
        process.wait()


def start_reader(url: str, streams: int, tokens: int, key: str = "") -> subprocess.Popen[str]:
    """Start a process that reads streams, and prints the totals of `read_streams`."""
    return _start("reader_process", [url, streams, tokens, key])


def _start(module: str, settings: list[Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"{_FOLDER}.{module}", json.dumps(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
