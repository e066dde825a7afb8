"""A folder with config.json and safetensors, whose tensors may be parts of quantized weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.config_file import read_config, read_json_object, read_optional_json_object
from chairlift.loading.quantized import READERS

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.quantized.base import QuantizedReader
    from chairlift.loading.stored_weight import NamedWeights, StoredWeight

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20  # the largest known have about ten megabytes
SINGLE = "model.safetensors"
# These are scales of an 8-bit KV cache; ours holds 8-bit floats without scales.
UNUSED_SCALES = (".k_scale", ".v_scale")
# Activations are not rounded, or with a scale for each row.
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".input_global_scale")


class SafetensorsCheckpoint(Checkpoint):
    """Puts the parts of quantized weights together; all other tensors are passed on as views of the mapped files."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_config(path / "config.json")
        self.generation_config = read_optional_json_object(path / "generation_config.json")
        self._shards = _shards(path)
        self.num_bytes = sum((path / shard).stat().st_size for shard in self._shards)
        self._reader = reader = quantized_reader(self.config)
        self._weights: dict[str, dict[str, str]] = {}  # quantized weights -> their parts -> the tensors of these
        if reader is not None:
            names = [name for names in self._shards.values() for name in names]
            self.quantization = reader.description() + _unused_scales(names)
            self._weights = reader.weights(names)
            if not self._weights:
                raise CorruptCheckpoint(
                    f"{self.path}: config.json says it is quantized, but no tensor is ({names[:3]} ...)"
                )
        self._weight_of = {
            name: (weight, part) for weight, parts in self._weights.items() for part, name in parts.items()
        }

    def names(self) -> list[str]:
        """The weights in the order in which their first parts are stored."""
        names = (name for names in self._shards.values() for name in names if not self._is_unused(name))
        return list(dict.fromkeys(self._weight_of.get(name, (name, ""))[0] for name in names))

    def stored(self) -> NamedWeights:
        """Yield a quantized weight when its last part is read."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._files():
            if self._is_unused(name):
                continue
            if name not in self._weight_of:
                yield name, tensor
                continue
            weight, part = self._weight_of[name]
            parts = waiting.setdefault(weight, {})
            parts[part] = tensor
            if len(parts) == len(self._weights[weight]):
                yield weight, self._read(weight, waiting.pop(weight))

    def _is_unused(self, name: str) -> bool:
        return self._reader is not None and name.endswith(UNUSED_SCALES)

    def _files(self) -> Iterator[tuple[str, Tensor]]:
        for shard, names in self._shards.items():
            file = self.path / shard
            with _refuse_damage(file):
                opened = safe_open(file, framework="pt", device="cpu")
            with opened:
                for name in names:
                    with _refuse_damage(file):
                        tensor = opened.get_tensor(name)
                    yield name, tensor

    def _read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        assert self._reader is not None
        try:
            return self._reader.read(weight, parts)
        except (RuntimeError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # parts of any shape
            shapes = ", ".join(f"{part} {list(tensor.shape)} {tensor.dtype}" for part, tensor in parts.items())
            raise CorruptCheckpoint(f"{weight}: its parts do not fit together ({shapes}): {error}") from error


def _unused_scales(names: Sequence[str]) -> str:
    """What the startup report says about scales of a checkpoint that are not used."""
    kinds = {"activations": ACTIVATION_SCALES, "the KV cache": UNUSED_SCALES}
    unused = [kind for kind, suffixes in kinds.items() if any(name.endswith(suffixes) for name in names)]
    return f" (its scales of {' and '.join(unused)} are not used)" if unused else ""


def _shards(folder: Path) -> dict[str, list[str]]:
    """The tensors to read from each file."""
    if (folder / INDEX).exists():
        return _indexed_shards(folder)
    file = SINGLE
    if not (folder / SINGLE).exists():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(names) != 1:
            raise CorruptCheckpoint(
                f"{folder}: has {len(names)} .safetensors files and no {INDEX} to say how they belong "
                "together: fetch the checkpoint again, with all of its files"
            )
        file = names[0]
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


def quantized_reader(config: Mapping[str, Any]) -> QuantizedReader | None:
    """The reader for the quantization_config of a config.json; None if there is none."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    method = _method(settings)
    if method not in READERS.names():
        supported = ", ".join(READERS.names())
        raise UnsupportedModel(
            f"the checkpoint is quantized by {method!r:.60}; supported are {supported} and GGUF files"
        )
    return READERS.get(method)(settings)


def quantization_name(config: Mapping[str, Any]) -> str | None:
    """What a checkpoint is quantized by, in a word or two, also if it cannot be read."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    algorithm = settings.get("quant_algo") if isinstance(settings, Mapping) else None
    return f"{_method(settings)!s:.60}" + (f" {algorithm!s:.60}" if algorithm else "")


def _method(settings: Any) -> Any:
    """ModelOpt's settings may name no method, or the one closest to a part of the weights; MLX's name none."""
    if not isinstance(settings, Mapping):
        return settings
    if settings.get("quant_algo"):
        return "modelopt"
    return settings.get("quant_method", "mlx" if "bits" in settings else None)
