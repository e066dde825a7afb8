"""The GGUF reader reads valid files correctly and refuses others."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.gguf import file as gguf_file
from chairlift.loading.gguf.file import GGUFFile
from tests.loading.gguf_writing import finish
from tests.loading.small_files import Damage, damages, loads_or_is_refused, write_small_gguf

MEGABYTE = 1 << 20


def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


DEQUANTISABLE = [kind for kind in gguf.GGML_QUANT_SIZES if _can_dequantise(kind)]


@pytest.mark.parametrize("kind", DEQUANTISABLE, ids=lambda kind: kind.name)
def test_every_quantization_is_read_as_by_the_gguf_package(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bytes are a valid tensor of any type, including types the package cannot write."""
    monkeypatch.setattr(gguf_file, "SLAB", 600)  # many slabs, the last of them incomplete
    type_size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 256, (3, 5, 2 * type_size), np.uint8)
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("before", np.ones(7, np.float32))
    writer.add_tensor("x", raw, raw_dtype=kind)
    finish(writer)
    file = GGUFFile(tmp_path / "x.gguf")
    tensor = file.tensors["x"]
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    assert tensor.shape == expected.shape
    assert tensor.num_bytes == raw.nbytes
    values = file.read(tensor)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(file.read(tensor, part=1), expected[1])


def test_more_than_one_default_slab(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((5, gguf_file.SLAB // 4), np.float32)
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", values.astype(np.float16), raw_dtype=GGMLQuantizationType.F16)
    finish(writer)
    file = GGUFFile(tmp_path / "x.gguf")
    np.testing.assert_array_equal(file.read(file.tensors["x"]), values.astype(np.float16))


def test_metadata_of_every_type(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "größer ▁")
    writer.add_array("texts", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])
    finish(writer)
    metadata = GGUFFile(tmp_path / "x.gguf").metadata
    assert {key: value for key, value in metadata.items() if not isinstance(value, np.ndarray)} == {
        "general.architecture": "llama",
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 1e-5,
        "f64": 0.1,
        "yes": True,
        "no": False,
        "text": "größer ▁",
        "texts": ["a", "", "ü"],
    }
    assert metadata["numbers"].tolist() == [1, -2, 3]
    assert metadata["floats"].tolist() == [0.5, -1.5]
    assert metadata["bools"].tolist() == [True, False]


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    numbers = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(name) + numbers + struct.pack("<IQ", kind, offset)


def _file(keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), version: int = 3) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    return header + b"".join(keys) + b"".join(tensors) + bytes(4096)


_DEEP = b"".join(struct.pack("<IQ", 9, 1) for _ in range(100)) + struct.pack("<IQ", 0, 0)
_U32 = struct.pack("<I", 3)

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "not GGUF": (b"PK\3\4" + bytes(100), "magic"),
    "only the magic number": (b"GGUF", "version"),
    "2**60 tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(99), "number of tensors"),
    "2**60 keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(99), "metadata keys"),
    "a key of 2**63 bytes": (_file([struct.pack("<Q", 2**63)]), "limit"),
    "a text of 2**40 bytes": (_file([_key("a", 8, struct.pack("<Q", 2**40))]), "'a' needs"),
    "a text that is not UTF-8": (_file([_key("a", 8, struct.pack("<Q", 1) + b"\xff")]), "UTF-8"),
    "2**50 numbers": (_file([_key("a", 9, struct.pack("<IQ", 0, 2**50))]), "length of 'a'"),
    "2**21 texts in a small file": (_file([_key("a", 9, struct.pack("<IQ", 8, 2**21))]), "length of 'a'"),
    "a text in a list beyond the end": (
        _file([_key("a", 9, struct.pack("<IQQ", 8, 1, 2**40))]),
        "string 0 of 'a' runs past the end",
    ),
    "4,000,000 empty arrays": (
        _file([_key("a", 9, struct.pack("<IQ", 9, 4_000_000) + struct.pack("<IQ", 4, 0) * 4_000_000)]),
        "length of 'a' is 4000000",
    ),
    "many arrays with many empty arrays": (
        _file(
            [_key("a", 9, struct.pack("<IQ", 9, 50) + (struct.pack("<IQ", 9, 90) + struct.pack("<IQ", 4, 0) * 90) * 50)]
        ),
        "too many nested arrays",
    ),
    "arrays 100 deep": (_file([_key("a", 9, _DEEP)]), "nests"),
    "an unknown value type": (_file([_key("a", 77, b"")]), "unknown value type 77"),
    "a key twice": (_file([_key("a", 4, _U32)] * 2), "appears twice"),
    "alignment of 3": (_file([_key("general.alignment", 4, _U32)]), "power of two"),
    "a tensor twice": (_file([], [_tensor("x", [8]), _tensor("x", [8], offset=32)]), "appears twice"),
    "overlapping tensors": (_file([], [_tensor("x", [64]), _tensor("y", [8], offset=32)]), "overlaps"),
    "no dimensions": (_file([], [_tensor("x", [])]), "0 dimensions"),
    "five dimensions": (_file([], [_tensor("x", [1] * 5)]), "5 dimensions"),
    "2**32 dimensions": (_file([], [_text("x") + struct.pack("<I", 2**32 - 1)]), "dimensions"),
    "an empty dimension": (_file([], [_tensor("x", [8, 0])]), "shape"),
    "a product that overflows 64 bits": (_file([], [_tensor("x", [2**63, 2**63, 4])]), "ends at"),
    "rows that do not fill blocks": (_file([], [_tensor("x", [33], kind=8)]), "blocks of 32"),
    "an offset beyond the file": (_file([], [_tensor("x", [8], offset=2**40)]), "ends at"),
    "a misaligned offset": (_file([], [_tensor("x", [8], offset=4)]), "multiple of 32"),
    "data cut short": (_file([], [_tensor("x", [4096])]), "ends at"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_before_anything_is_allocated(case: str, tmp_path: Path) -> None:
    content, problem = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match=problem) as caught:
            GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 2 * MEGABYTE


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_other_versions_and_big_endian_files_are_not_supported(version: int, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(_file(version=version))
    with pytest.raises(UnsupportedModel, match=f"version {version}"):
        GGUFFile(tmp_path / "x.gguf")


@pytest.mark.parametrize(("kind", "problem"), [(999, "unknown tensor type 999"), (28, "F64")])
def test_a_tensor_type_that_cannot_be_read_is_named(kind: int, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(_file([], [_tensor("x", [8], kind=kind)]))
    with pytest.raises(UnsupportedModel, match=problem):
        GGUFFile(tmp_path / "x.gguf")


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        GGUFFile(tmp_path)  # a folder


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=damages(), only_header=st.booleans())
def test_a_damaged_file_loads_or_is_refused(damage: Damage, only_header: bool, tmp_path: Path) -> None:
    original = tmp_path / "small.gguf"
    if not original.exists():
        write_small_gguf(original)
    content = original.read_bytes()
    split = content.index(b"output_norm.weight") if only_header else len(content)
    damaged = tmp_path / "damaged.gguf"
    damaged.unlink(missing_ok=True)  # it may still be mapped
    damaged.write_bytes(damage(content[:split]) + content[split:])
    tracemalloc.start()
    try:
        loads_or_is_refused(damaged)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * MEGABYTE


def test_the_undamaged_file_loads(tmp_path: Path) -> None:
    assert loads_or_is_refused(write_small_gguf(tmp_path / "small.gguf"))
