"""The file of packed weights: written whole, mapped, and refused if it is damaged or old."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift.loading.weight_cache import cache_file, store
from chairlift.loading.weight_cache.cache_file import (
    TRAILER,
    CacheWriter,
    PackedArray,
    PackedWeightArrays,
    UnusableCache,
    read_cache,
)
from chairlift.loading.weight_cache.store import WeightRecorder, checkpoint_state, config_state

IDENTITY = {"checkpoint": "a", "version": [1, 2]}


def weights() -> dict[str, PackedWeightArrays]:
    random = np.random.default_rng(0)
    numbers = random.integers(0, 256, (3, 70_000), dtype=np.uint8)
    scales = random.standard_normal(48).astype(np.float32)
    tiles = [PackedArray("numbers", numbers), PackedArray("scales", scales)]
    return {
        "layers.0.0": PackedWeightArrays("int8", tiles),
        "head": PackedWeightArrays("blocks", [PackedArray("Q4_0", numbers[:1])]),
    }


def write(path: Path) -> None:
    writer = CacheWriter(path, IDENTITY)
    for name, weight in weights().items():
        mapped = writer.add(name, weight, 2)
        assert all(np.array_equal(*pair) for pair in values(mapped, weight))
    assert not path.exists()  # until it is complete
    writer.finish()


def values(*pair: PackedWeightArrays) -> list[tuple[Any, ...]]:
    return list(zip(*([array.values for array in weight.arrays] for weight in pair), strict=True))


def test_weights_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "file.weights"
    write(path)
    assert os.listdir(tmp_path) == [path.name]
    found = read_cache(path, IDENTITY, 2)
    assert found.keys() == weights().keys()
    for name, weight in weights().items():
        assert found[name].format == weight.format
        assert all(np.array_equal(*pair) for pair in values(found[name], weight))
        assert all(array.values.flags.writeable for array in found[name].arrays)  # as compiled kernels expect them
    found["head"].arrays[0].values[:] = 0  # a copy of the page, not the file
    assert np.array_equal(read_cache(path, IDENTITY, 1)["head"].arrays[0].values, weights()["head"].arrays[0].values)


def test_arrays_share_huge_pages(tmp_path: Path) -> None:
    """Arrays that end and begin within a huge page are all there, and the file is no longer than its content."""
    path, random = tmp_path / "file.weights", np.random.default_rng(0)
    arrays = [random.integers(0, 256, size, dtype=np.uint8) for size in (5_000_000, 300, 2_097_152, 6_000_000)]
    writer = CacheWriter(path, IDENTITY)
    written = [
        writer.add(str(n), PackedWeightArrays("int8", [PackedArray("a", one)]), 1) for n, one in enumerate(arrays)
    ]
    writer.finish()
    found = read_cache(path, IDENTITY, 1)
    for n, one in enumerate(arrays):
        assert np.array_equal(written[n].arrays[0].values, one)
        assert np.array_equal(found[str(n)].arrays[0].values, one)
    assert path.stat().st_size < sum(map(len, arrays)) + 20_000


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_mapped_weights_request_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "file.weights"
    writer = CacheWriter(path, IDENTITY)
    kept = [writer.add(name, weight, 1) for name, weight in weights().items()]
    requests = _requests_of_huge_pages("file.weights.partial")
    assert requests
    assert all(requests)
    writer.finish()
    del kept
    found = read_cache(path, IDENTITY, 1)
    assert _requests_of_huge_pages("file.weights") == [True]
    del found


def _requests_of_huge_pages(name: str) -> list[bool]:
    """Of each mapping of a file of this name, whether it requests huge pages."""
    regions = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return ["hg" in region.rsplit("VmFlags:")[-1].split() for region in regions if region.split("\n")[0].endswith(name)]


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    """Except in the padding between arrays, which is never read."""
    path = tmp_path / "file.weights"
    write(path)
    whole = path.read_bytes()
    offset, length = TRAILER.unpack(whole[-TRAILER.size :])[1:3]
    entries = [
        entry
        for weight in json.loads(whole[offset : offset + length])["weights"].values()
        for entry in weight["arrays"]
    ]
    ends = [entry["offset"] + np.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize for entry in entries]
    places = [entry["offset"] for entry in entries] + [end - 1 for end in ends] + [offset, offset + length // 2]
    places += [len(whole) - 1 - place for place in (0, 31, 40, 63)] + [12_345, 70_000, 139_999]
    for place in map(int, places):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(UnusableCache):
            read_cache(path, IDENTITY, 1)
    for size in (0, 1, TRAILER.size, offset, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UnusableCache):
            read_cache(path, IDENTITY, 1)
    path.write_bytes(whole)
    with pytest.raises(UnusableCache, match="another"):
        read_cache(path, IDENTITY | {"version": [1, 3]}, 1)


def forged(index: object) -> bytes:
    import hashlib

    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    return bytes(8192) + text + TRAILER.pack(cache_file.MAGIC, 8192, len(text), hashlib.sha256(text).digest())


ENTRY = {"label": "Q4_0", "dtype": "uint8", "shape": [1, 64], "offset": 0, "checksum": ""}


@pytest.mark.parametrize(
    "entry",
    [
        ENTRY | {"offset": 4096 * 2},
        ENTRY | {"offset": -4096},
        ENTRY | {"offset": 1},
        ENTRY | {"offset": 0.0},
        ENTRY | {"shape": [1 << 40, 1 << 40]},
        ENTRY | {"shape": [-1, -8]},
        ENTRY | {"shape": []},
        ENTRY | {"shape": [1] * 40},
        ENTRY | {"shape": "ab"},
        ENTRY | {"dtype": "object"},
        ENTRY | {"dtype": "float16"},
        ENTRY | {"dtype": [1]},
        {"label": "Q4_0"},
        7,
        ENTRY,  # its checksum is wrong
    ],
)
def test_forged_indexes_are_refused(entry: object, tmp_path: Path) -> None:
    path = tmp_path / "file.weights"
    path.write_bytes(forged({"identity": IDENTITY, "weights": {"head": {"format": "blocks", "arrays": [entry]}}}))
    with pytest.raises(UnusableCache):
        read_cache(path, IDENTITY, 1)


@pytest.mark.parametrize("index", [b"{", b"[]", b"\xff", {"identity": IDENTITY, "weights": 3}, {"identity": IDENTITY}])
def test_other_contents_are_refused(index: object, tmp_path: Path) -> None:
    path = tmp_path / "file.weights"
    path.write_bytes(forged(index))
    with pytest.raises(UnusableCache):
        read_cache(path, IDENTITY, 1)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_full_disk_leaves_weights_in_memory(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwrite, iter(range(100))

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    recorder = WeightRecorder(tmp_path / "file.weights", IDENTITY, 1)
    for name, weight in weights().items():
        kept = PackedWeightArrays(weight.format, recorder.keep(name, weight.format, weight.arrays))
        assert all(np.array_equal(*pair) for pair in values(kept, weight))
    recorder.finish()
    recorder.close()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("refused", ["posix_fallocate", "pwrite"])
def test_neither_no_room_nor_lost_writes_are_fatal(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room: reading a page of a hole would be fatal. Lost writes: some file systems bypass pages in memory."""

    def no_room(*where: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lost = lambda file, data, offset: len(data)  # noqa: E731
    monkeypatch.setattr(os, refused, no_room if refused == "posix_fallocate" else lost)
    recorder = WeightRecorder(tmp_path / "file.weights", IDENTITY, 1)
    for name, weight in weights().items():
        kept = PackedWeightArrays(weight.format, recorder.keep(name, weight.format, weight.arrays))
        assert all(np.array_equal(*pair) for pair in values(kept, weight))
    recorder.close()
    assert not os.listdir(tmp_path)


def test_a_changed_checkpoint_has_another_state(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1 << 20))
    before, times = checkpoint_state(path), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    assert checkpoint_state(path) == before
    os.utime(path, ns=(times[0], times[1] + 1))
    assert checkpoint_state(path) != before
    path.write_bytes(bytes(100) + b"x" + bytes((1 << 20) - 101))
    os.utime(path, ns=times)
    assert checkpoint_state(path) != before


def test_a_folder_counts_files_that_say_how_weights_are_read(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json", "quantize_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    states = [checkpoint_state(tmp_path)]
    for name in ("tokenizer.json", "model.safetensors.index.json", "quantize_config.json"):
        (tmp_path / name).write_text('{"changed": true}')
        states.append(checkpoint_state(tmp_path))
    assert states[0] == states[1] != states[2] != states[3]


def test_a_changed_config_has_another_state() -> None:
    assert config_state({"a": 1, "b": [2]}) == config_state({"b": [2], "a": 1}) != config_state({"a": 1, "b": [3]})


@pytest.mark.parametrize(
    "file",
    [
        "__init__.py",  # the version
        "loading/safetensors_checkpoint.py",
        "loading/gguf/families.toml",
        "loading/quantized/integers.py",
        "models/families/__init__.py",
        "models/families/llama.toml",
        "models/loader.py",
        "layers/formats/int8.py",
        "kernels/cpu/blocks/panels.py",
    ],
)
def test_a_changed_reader_family_or_format_has_another_state(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in store.SOURCES:
        shutil.copytree(store.PACKAGE / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(store.PACKAGE / store.VERSION, tmp_path)
    monkeypatch.setattr(store, "PACKAGE", tmp_path)
    before = store.code_state.__wrapped__()
    assert store.code_state.__wrapped__() == before
    changed = tmp_path / file
    changed.write_text(changed.read_text() + "# changed")
    assert store.code_state.__wrapped__() != before


def test_plugins_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text("one")
    states = [store.code_state.__wrapped__()]
    monkeypatch.setattr(store, "plugin_sources", lambda: [plugin])
    states.append(store.code_state.__wrapped__())
    plugin.write_text("two")
    states.append(store.code_state.__wrapped__())
    assert len({repr(state) for state in states}) == 3


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("from chairlift.core.policies.base import POLICIES", False),
        ("import chairlift\nfrom chairlift import SamplingParams", False),
        ("from chairlift.models.families import FAMILIES", True),
        ("from chairlift.core import plan\nimport chairlift.layers.formats", True),
        ("from chairlift import core, models", True),
        ("from chairlift import (\n    core,\n    loading,\n)", True),
        ("from importlib import import_module\nimport chairlift.core", True),
        ("import my_formats", True),
    ],
)
def test_only_plugins_that_weights_may_go_through_count(
    source: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = store.code_state.__wrapped__()
    plugin = tmp_path / "plugin.py"
    plugin.write_text(source)
    monkeypatch.setattr(store, "plugin_sources", lambda: [plugin])
    assert (store.code_state.__wrapped__() != before) is counts
    assert store.weight_plugins() == [plugin] * counts


def test_links_and_files_of_others_are_neither_written_nor_read(tmp_path: Path) -> None:
    path, victim = tmp_path / "file.weights", tmp_path / "victim"
    victim.write_text("precious")
    partial = tmp_path / "file.weights.partial"
    partial.symlink_to(victim)
    with pytest.raises(OSError, match="is a link, or belongs to another user"):
        write(path)
    assert victim.read_text() == "precious"
    partial.unlink()
    partial.write_text("of a start that was killed")
    write(path)
    read_cache(path, IDENTITY, 1)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(UnusableCache, match="symbolic links"):
        read_cache(tmp_path / "link", IDENTITY, 1)
    path.chmod(0o666)
    with pytest.raises(UnusableCache, match="can be written by other users"):
        read_cache(path, IDENTITY, 1)
