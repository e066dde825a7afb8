"""The stores of tiers: what is put is got back, across restarts and crashes, and nothing else ever is."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.core.kv.tiers import LoadEnded, Lost, PartKey, PartMove
from chairlift.errors import InvalidParameter
from chairlift.runner.tiers import mover as mover_module
from chairlift.runner.tiers.mover import DISK, HOST, ThreadedMover
from chairlift.runner.tiers.stores import OVERHEAD, Data, DiskStore, HostStore, is_intact, open_folder, scan

SIZES = {"kv": 1000, "state": 50}
ABOUT = {"weights": "some", "block_size": 16}
BIG = 1 << 30


def key(number: int, part: str = "kv") -> PartKey:
    return PartKey(number.to_bytes(32, "big"), part)


def data(number: int, part: str = "kv") -> bytes:
    return bytes([number % 251]) * SIZES[part]


def opened(folder: Path, num_bytes: int = BIG, **about: Any) -> DiskStore:
    return DiskStore(folder, num_bytes, ABOUT | about, SIZES)


def file_of(folder: Path, part: PartKey) -> Path:
    (path,) = folder.rglob(f"{part.digest.hex()}.{part.part}")
    return path


def test_parts_survive_a_restart_in_the_order_of_their_use(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(4):
        store.put(key(number), data(number))
        os.utime(file_of(tmp_path, key(number)), (number, number))
    store.put(key(4, "state"), data(4, "state"))
    store.get(key(1))
    store.close()
    again = opened(tmp_path)
    found = [part.key for part in again.found]
    assert found[:3] == [key(0), key(2), key(3)]
    assert set(found[3:]) == {key(1), key(4, "state")}
    assert all(bytes(again.get(key(number)) or b"") == data(number) for number in range(4))
    assert bytes(again.get(key(4, "state")) or b"") == data(4, "state")


def test_only_the_owner_can_read_what_is_kept(tmp_path: Path) -> None:
    store = opened(tmp_path / "kv")
    store.put(key(1), data(1))
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def flip(content: bytes) -> bytes:
    return content[:500] + bytes([content[500] ^ 1]) + content[501:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit": flip,
    "cut off": lambda content: content[:-1],
    "empty": lambda content: b"",
    "too long": lambda content: content + b"x",
    "another length in the header": lambda content: content[:88] + (2**60).to_bytes(8, "little") + content[96:],
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_missing(tmp_path: Path, damage: str) -> None:
    store = opened(tmp_path)
    store.put(key(1), data(1))
    path = file_of(tmp_path, key(1))
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert store.get(key(1)) is None
    assert not path.exists()
    assert not store.contains(key(1))


def test_a_part_under_the_name_of_another_is_missing(tmp_path: Path) -> None:
    """With its own signature, so that a crafted name cannot give a prompt the keys and values of another."""
    store = opened(tmp_path)
    store.put(key(1), data(1))
    store.put(key(2), data(2))
    file_of(tmp_path, key(2)).write_bytes(file_of(tmp_path, key(1)).read_bytes())
    assert store.get(key(2)) is None
    assert bytes(store.get(key(1)) or b"") == data(1)


def test_a_part_signed_in_another_folder_is_missing(tmp_path: Path) -> None:
    theirs, ours = opened(tmp_path / "theirs"), opened(tmp_path / "ours")
    theirs.put(key(1), data(1))
    ours.put(key(1), data(2))
    file_of(tmp_path / "ours", key(1)).write_bytes(file_of(tmp_path / "theirs", key(1)).read_bytes())
    assert ours.get(key(1)) is None


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "writable by others"])
def test_what_is_no_private_file_is_missing(tmp_path: Path, kind: str) -> None:
    store = opened(tmp_path)
    store.put(key(1), data(1))
    path = file_of(tmp_path, key(1))
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        other = tmp_path / "other"
        other.write_bytes(content)
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content)
        path.chmod(0o666)
    assert store.get(key(1)) is None


def test_another_model_finds_nothing_and_gives_way(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(3):
        store.put(key(number), data(number))
    store.close()
    size = 1000 + OVERHEAD
    other = opened(tmp_path, 4 * size, weights="others")
    assert not other.found
    assert other.of_other_models(key(1).digest)
    assert other.get(key(1)) is None
    for number in range(4):
        other.put(key(number), data(number + 100))
    models = {model.about["weights"]: len(model.files) for model in scan(tmp_path)}
    assert models == {"some": 0, "others": 4}


def test_parts_of_another_size_are_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(key(1), data(1))
    path = file_of(tmp_path, key(1))
    path.write_bytes(b"short")
    partial = path.with_name("0.kv.partial")
    partial.write_bytes(b"of a process that was killed")
    store.close()
    assert not opened(tmp_path).found
    assert not path.exists()
    assert not partial.exists()


def test_a_new_key_makes_all_parts_invalid(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(key(1), data(1))
    store.close()
    (tmp_path / "key").unlink()
    again = opened(tmp_path)
    assert again.contains(key(1))
    assert again.get(key(1)) is None


def test_a_folder_has_one_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(InvalidParameter, match=r"kv_disk: .* in use by another process"):
        opened(tmp_path)
    store.close()
    opened(tmp_path)


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(InvalidParameter, match="kv_disk"):
        opened(folder)


def test_a_killed_process_leaves_only_whole_parts(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.runner.test_tier_stores import *\n"
        "store = opened(Path(sys.argv[1])); print('ready', flush=True)\n"
        "for number in range(1_000_000): store.put(key(number % 500), data(number % 500))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    while sum(len(model.files) for model in scan(tmp_path)) < 20:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    again = opened(tmp_path)
    assert len(again.found) >= 20
    for part in again.found:
        number = int.from_bytes(part.key.digest, "big")
        assert bytes(again.get(part.key) or b"") == data(number)
    assert not list(tmp_path.rglob("*.partial"))


def test_files_can_be_verified_without_a_model(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for number in range(3):
        store.put(key(number), data(number))
    store.close()
    path = file_of(tmp_path, key(1))
    path.write_bytes(flip(path.read_bytes()))
    _, secret = open_folder(tmp_path)
    (model,) = scan(tmp_path)
    intact = {file.key for file in model.files if is_intact(file, model.fingerprint, secret)}
    assert intact == {key(0), key(2)}


@pytest.mark.parametrize("kind", ["link", "pipe", "deeply nested", "huge"])
def test_no_file_of_a_folder_stops_a_start_or_a_check(tmp_path: Path, kind: str) -> None:
    store = opened(tmp_path)
    store.put(key(1), data(1))
    store.close()
    about, part = tmp_path / store.fingerprint / "about.json", file_of(tmp_path, key(1))
    about.unlink()
    if kind == "link":
        about.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(about)
    elif kind == "deeply nested":
        about.write_text("[" * 60_000)
    else:
        header = part.read_bytes()[:88] + (1 << 42).to_bytes(8, "little")
        part.write_bytes(header.replace(header[:1], b"?"))
        os.truncate(part, (1 << 42) + OVERHEAD)  # no memory has room for it
    lock, secret = open_folder(tmp_path)
    (model,) = scan(tmp_path)
    assert model.about == {}
    assert [is_intact(file, model.fingerprint, secret) for file in model.files] == [kind != "huge"]
    os.close(lock)
    if kind in ("link", "pipe"):
        about.unlink()
    assert len(opened(tmp_path).found) == (kind != "huge")


def test_a_folder_that_could_not_be_opened_is_not_in_use(tmp_path: Path) -> None:
    opened(tmp_path).close()
    (tmp_path / "key").unlink()
    (tmp_path / "key").mkdir()
    with pytest.raises(InvalidParameter, match="kv_disk"):
        opened(tmp_path)
    (tmp_path / "key").rmdir()
    opened(tmp_path).close()


# ---- the mover ------------------------------------------------------------------------------------------------------


class FakeDevice:
    """Parts of a device as a dictionary."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}

    def read(self, move: PartMove) -> Data:
        return self.parts[move.place]

    def write(self, move: PartMove, data: Data) -> None:
        self.parts[move.place] = bytes(data)


@pytest.fixture
def parts() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def mover(parts: FakeDevice, tmp_path: Path) -> Iterator[ThreadedMover]:
    mover = ThreadedMover(parts, HostStore(), opened(tmp_path))
    yield mover
    mover.close()


def saved(mover: ThreadedMover, parts: FakeDevice, *numbers: int, tiers: tuple[str, ...] = (DISK,)) -> None:
    for number in numbers:
        parts.parts[number] = data(number)
    mover.save([(tiers, PartMove(key(number), number)) for number in numbers])
    parts.parts.clear()


def wait_for_reports(mover: ThreadedMover, count: int = 1) -> list[Lost | LoadEnded]:
    found: list[Lost | LoadEnded] = []
    while len(found) < count:
        mover.wait(1.0)
        found += mover.reports()
    return found


def wait_until_written(mover: ThreadedMover) -> None:
    while mover._unwritten:
        time.sleep(0.001)


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_what_was_saved_is_loaded(mover: ThreadedMover, parts: FakeDevice, tier: str) -> None:
    saved(mover, parts, 1, 2, tiers=(tier,))
    wait_until_written(mover)
    mover.load(7, [(tier, PartMove(key(1), 30)), (tier, PartMove(key(2), 31))])
    (report,) = wait_for_reports(mover)
    assert isinstance(report, LoadEnded)
    assert (report.load_id, report.failed) == (7, frozenset())
    assert parts.parts == {30: data(1), 31: data(2)}


def test_what_waits_to_be_written_is_loaded_from_memory(
    mover: ThreadedMover, parts: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk delays neither saves nor loads of what it has not got yet."""
    released = []
    put = DiskStore.put

    def slow(store: DiskStore, part: PartKey, content: Data) -> None:
        while not released:
            time.sleep(0.001)
        put(store, part, content)

    monkeypatch.setattr(DiskStore, "put", slow)
    saved(mover, parts, 1, 2)
    mover.load(1, [(DISK, PartMove(key(2), 5))])
    assert wait_for_reports(mover)[-1] == LoadEnded(1, frozenset(), {DISK: pytest.approx(0, abs=10)})
    assert parts.parts == {5: data(2)}
    released.append(True)


def test_parts_after_a_missing_one_are_not_loaded(mover: ThreadedMover, parts: FakeDevice, tmp_path: Path) -> None:
    saved(mover, parts, 1, 2, 3)
    wait_until_written(mover)
    file_of(tmp_path, key(2)).unlink()
    mover.load(1, [(DISK, PartMove(key(number), number)) for number in (1, 2, 3)])
    lost, loaded = wait_for_reports(mover, 2)
    assert lost == Lost(DISK, key(2))
    assert isinstance(loaded, LoadEnded)
    assert loaded.failed == {key(2), key(3)}
    assert parts.parts == {1: data(1)}


def test_a_full_disk_loses_parts_and_nothing_else(
    mover: ThreadedMover, parts: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(file: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        saved(mover, parts, 1, 2)
        reports = wait_for_reports(mover, 2)
    assert reports == [Lost(DISK, key(1)), Lost(DISK, key(2))]
    assert not list(tmp_path.rglob("*.partial"))
    monkeypatch.setattr(mover_module, "PAUSE_AFTER_ERROR", 0.0)


def test_short_reads_and_writes_are_continued(
    mover: ThreadedMover, parts: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, readv = os.write, os.readv
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:333]))
    monkeypatch.setattr(os, "readv", lambda file, buffers: readv(file, [buffers[0][:77]]))
    saved(mover, parts, 1)
    wait_until_written(mover)
    mover.load(1, [(DISK, PartMove(key(1), 9))])
    wait_for_reports(mover)
    assert parts.parts == {9: data(1)}


def test_what_is_dropped_is_gone(mover: ThreadedMover, parts: FakeDevice, tmp_path: Path) -> None:
    saved(mover, parts, 1, 2, tiers=(HOST, DISK))
    mover.drop(DISK, [key(1)])
    mover.drop(HOST, [key(1)])
    wait_until_written(mover)
    mover.load(1, [(HOST, PartMove(key(1), 5))])
    mover.load(2, [(DISK, PartMove(key(1), 5))])
    reports = wait_for_reports(mover, 4)
    assert [report for report in reports if isinstance(report, Lost)] == [Lost(HOST, key(1)), Lost(DISK, key(1))]
    assert not parts.parts
    assert file_of(tmp_path, key(2))


def test_removing_files_takes_no_time_of_the_caller(
    mover: ThreadedMover, parts: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved(mover, parts, 1, 2)
    wait_until_written(mover)
    released = threading.Event()
    evict = DiskStore.evict

    def slow(store: DiskStore, part: PartKey) -> None:
        released.wait()
        evict(store, part)

    monkeypatch.setattr(DiskStore, "evict", slow)
    mover.drop(DISK, [key(1), key(2)])
    saved(mover, parts, 2)  # It is written after its older file was removed.
    assert file_of(tmp_path, key(1))
    released.set()
    wait_until_written(mover)
    assert not list(tmp_path.rglob(f"{key(1).digest.hex()}*"))
    assert file_of(tmp_path, key(2))


def test_too_much_that_waits_is_not_written(
    mover: ThreadedMover, parts: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "MAX_QUEUED_BYTES", 999)
    saved(mover, parts, 1)
    assert mover.reports() == [Lost(DISK, key(1))]


def test_closing_writes_what_waits(parts: FakeDevice, tmp_path: Path) -> None:
    mover = ThreadedMover(parts, None, opened(tmp_path))
    saved(mover, parts, *range(200))
    mover.close()
    assert len(opened(tmp_path).found) == 200
