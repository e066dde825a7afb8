"""Loads more than 150 hostile model files with a limit on memory; prints those that are not refused properly, and which
one took longest.

Run as a program, since the limit applies to a whole process: python -m tests.loading.hostile_files FOLDER
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chairlift.errors import ChairliftError
from chairlift.loading.checkpoint import open_checkpoint
from chairlift.loading.tokenizer import make_tokenizer
from chairlift.models import describe
from tests.loading.small_files import write_small_gguf
from tests.loading.test_gguf_file import HOSTILE
from tests.tiny import write_tiny_checkpoint

MEMORY = 200 * 2**20  # bytes for each file, beyond what Python and the imports take
HANG_SECONDS = 60  # far more than any file takes on a busy machine
COUNTS = (1, 2**16, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
JUNK: tuple[Any, ...] = (None, -1, 0, 2**40, 10**400, 1.5, "x", [], {}, [[]] * 1000, True)
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rope_parameters", "model_type")
MANY = 1_000_000


def gguf_files() -> Iterator[tuple[str, bytes]]:
    yield from ((name, content) for name, (content, _) in HOSTILE.items())
    good = write_small_gguf(Path(sys.argv[1]) / "small.gguf").read_bytes()
    yield from ((f"cut at {i}/30", good[: len(good) * i // 30]) for i in range(30))
    yield from ((f"{n} tensors", good[:8] + struct.pack("<Q", n) + good[16:]) for n in COUNTS)
    yield from ((f"{n} keys", good[:16] + struct.pack("<Q", n) + good[24:]) for n in COUNTS)
    for name, kind, item in (("empty strings", 8, bytes(8)), ("empty arrays", 9, struct.pack("<IQ", 9, 0))):
        key = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, 4 * MANY) + item * 4 * MANY
        yield f"{4 * MANY} {name}", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key


def safetensors_headers() -> Iterator[tuple[str, bytes]]:
    yield from ((f"a header of {n} bytes", struct.pack("<Q", n) + b"{}" * 50) for n in COUNTS)
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    for change in (
        {"dtype": "X"},
        {"shape": [2**40]},
        {"shape": [-1]},
        {"data_offsets": [4, 0]},
        {"shape": [1] * 5000},
    ):
        yield str(change)[:60], header({"a": {**tensor, **change}})
    yield "many tensors", header({str(i): {**tensor, "shape": [0], "data_offsets": [0, 0]} for i in range(MANY // 5)})
    yield "deep", b"[" * 100_000
    yield "nothing", b""


def header(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


def json_texts(good: dict[str, Any], fields: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    yield from (
        (f"{field} = {str(junk)[:20]}", json.dumps(good | {field: junk}).encode()) for field in fields for junk in JUNK
    )
    yield from (
        (text[:20], text.encode()) for text in ("", "null", "[]", "{", '{"a": NaN', "[" * 100_000, '{"a": ' * 5000)
    )
    yield "many fields", json.dumps({str(i): [] for i in range(MANY)}).encode()
    yield "not text", b"\xff\xfe" * 1000


def hostile_checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a name and the path of a checkpoint that is only there until the next one."""
    for name, content in gguf_files():
        (folder / "hostile.gguf").unlink(missing_ok=True)  # it may still be mapped
        (folder / "hostile.gguf").write_bytes(content)
        yield f"GGUF: {name}", folder / "hostile.gguf"
    good = write_tiny_checkpoint(folder / "good")
    tokenizer = json.loads((good / "tokenizer.json").read_text())
    for file, contents in (
        ("model.safetensors", safetensors_headers()),
        ("config.json", json_texts(json.loads((good / "config.json").read_text()), FIELDS)),
        ("tokenizer.json", json_texts(tokenizer, ("model", "added_tokens", "pre_tokenizer"))),
    ):
        for name, content in contents:
            shutil.rmtree(folder / "bad", ignore_errors=True)
            shutil.copytree(good, folder / "bad")
            (folder / "bad" / file).unlink()
            (folder / "bad" / file).write_bytes(content)
            yield f"{file}: {name}", folder / "bad"


def load(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    describe(checkpoint.config)
    for _ in checkpoint.tensors():
        pass
    make_tokenizer(checkpoint).encode("a b")


def main() -> None:
    folder = Path(sys.argv[1])
    load(write_small_gguf(folder / "good.gguf"))  # imports all that loading needs
    load(write_tiny_checkpoint(folder / "first"))
    count, slowest = 0, (0.0, "")
    for name, path in hostile_checkpoints(folder):
        used = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        signal.alarm(HANG_SECONDS)  # ends the process
        count += 1
        began = time.process_time()
        try:
            load(path)
        except ChairliftError as error:
            if isinstance(error.__cause__, MemoryError):
                print(f"{name}: takes too much memory")
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}"[:200])
        signal.alarm(0)
        slowest = max(slowest, (time.process_time() - began, name))
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(f"{count} files; the slowest took {slowest[0]:.2f} s of CPU time: {slowest[1]}", file=sys.stderr)


if __name__ == "__main__":
    main()
