"""A Hugging Face folder: config.json and one or many .safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from chairlift.errors import CorruptCheckpoint
from chairlift.loading.json_file import read_config, read_json_object, read_optional_json_object

if TYPE_CHECKING:
    import torch

    from chairlift.loading.stored_weight import StoredWeight

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20  # the largest known have about ten megabytes
SINGLE = "model.safetensors"


class SafetensorsCheckpoint:
    format = "safetensors"
    quantization: str | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path / "config.json")
        self.generation_config = read_optional_json_object(path / "generation_config.json")
        self._shards = _shards(path)
        self.num_bytes = sum((path / shard).stat().st_size for shard in self._shards)

    def names(self) -> list[str]:
        return [name for names in self._shards.values() for name in names]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views of the memory-mapped files."""
        for shard, names in self._shards.items():
            file = self.path / shard
            with _refuse_damage(file):
                opened = safe_open(file, framework="pt", device="cpu")
            with opened:
                for name in names:
                    with _refuse_damage(file):
                        tensor = opened.get_tensor(name)
                    yield name, tensor

    def stored(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        return self.tensors()


def _shards(folder: Path) -> dict[str, list[str]]:
    """The tensors to read from each file."""
    if (folder / INDEX).exists():
        return _indexed_shards(folder)
    file = SINGLE
    if not (folder / SINGLE).exists():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(found) != 1:
            raise CorruptCheckpoint(
                f"{folder}: has {len(found)} .safetensors files and no {INDEX} to say how they belong "
                "together: fetch the checkpoint again, with all of its files"
            )
        file = found[0]
    return {file: _stored_names(folder / file)}


def _indexed_shards(folder: Path) -> dict[str, list[str]]:
    weight_map = read_json_object(folder / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpoint(f"{folder / INDEX}: has no weight_map; fetch it again")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(_safe_file_name(shard, folder), []).append(name)
    for shard, names in shards.items():
        if not (folder / shard).is_file():
            raise CorruptCheckpoint(f"{folder}: the file {shard} that {INDEX} names is missing; fetch it")
        missing = set(names).difference(_stored_names(folder / shard))
        if missing:
            raise CorruptCheckpoint(
                f"{folder / shard}: lacks {len(missing)} tensors that {INDEX} puts there, such as "
                f"{min(missing)!r}; fetch both files again"
            )
    return shards


def _safe_file_name(shard: Any, folder: Path) -> str:
    """Refuse shard names that are not a file in the folder itself."""
    plain = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard and "\0" not in shard
    if not plain or not shard.endswith(".safetensors"):
        raise CorruptCheckpoint(f"{folder / INDEX}: names {shard!r:.100}, which is not a plain .safetensors file")
    return str(shard)


def _stored_names(file: Path) -> list[str]:
    # With framework="pt" this would import torch, which the front end of the server does without.
    with _refuse_damage(file), safe_open(file, framework="np") as opened:
        return list(opened.keys())


@contextmanager
def _refuse_damage(file: Path) -> Iterator[None]:
    """Turn the many exception types of safetensors into CorruptCheckpoint."""
    try:
        yield
    except Exception as error:
        raise CorruptCheckpoint(
            f"{file}: cannot be read as safetensors ({error}). It is damaged or incomplete: fetch it again."
        ) from error
