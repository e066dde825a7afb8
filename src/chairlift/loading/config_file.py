"""The small JSON files of a checkpoint, and a config.json without weights, for which random ones are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chairlift.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel

MODELOPT_FILE = "hf_quant_config.json"
MAX_JSON_BYTES = 4 << 20  # the largest known files of settings have about one megabyte


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)  # a device has no size
        if len(data) > max_bytes:
            raise CorruptCheckpoint(f"{path}: is larger than {max_bytes} bytes")
        return json.loads(data)
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: is not valid JSON ({error}): fetch it again") from None


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    value = read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    decoded: dict[str, Any] = decode_special_floats(value)
    return decoded


def read_config(file: Path) -> dict[str, Any]:
    """A config.json, where `quantization_config` also has what other places say about the weights.

    These are the config of the text part of a larger model, ModelOpt's own file beside config.json, and the key under
    which MLX writes its settings.
    """
    config = read_json_object(file)
    nested = (part.get("quantization_config") for part in config.values() if isinstance(part, dict))
    settings = config.get("quantization_config") or next(filter(None, nested), None)
    modelopt = None if settings else read_optional_json_object(file.with_name(MODELOPT_FILE)).get("quantization")
    if isinstance(modelopt, dict) and modelopt.get("quant_algo"):
        settings = modelopt | {"quant_method": "modelopt"}
    mlx = config.get("quantization")
    settings = settings or (mlx if isinstance(mlx, dict) and "bits" in mlx else None)
    return config | {"quantization_config": settings} if settings else config


def read_optional_json_object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def decode_special_floats(value: Any) -> Any:
    """The value with numbers in place of what stands for those that JSON does not have.

    Transformers writes objects such as {"__float__": "Infinity"}; some published files have just the word.
    """
    if isinstance(value, str) and value in ("Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: decode_special_floats(inner) for key, inner in value.items()}
    return [decode_special_floats(inner) for inner in value] if isinstance(value, list) else value


class ConfigCheckpoint:
    """A config.json, given by its path or its folder, where there may be a tokenizer as well."""

    format = "dummy"
    quantization: str | None = None

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ModelNotFound(f"{path}: there is no config.json, which is all that load_format='dummy' needs")
        self.path = file.parent
        self.config: dict[str, Any] = read_config(file)
        if self.config.get("quantization_config") and not (self.has_4_bit_experts or self.has_4_bit_layers):
            raise UnsupportedModel(
                f"{file}: has a quantization_config, but random weights are not quantized, except mxfp4 and symmetric "
                "gptq of 4 bits; remove it and choose the format with --quantization"
            )
        self.generation_config: dict[str, Any] = {}
        self.num_bytes = 0

    @property
    def has_4_bit_experts(self) -> bool:
        return self._settings.get("quant_method") == "mxfp4"

    @property
    def has_4_bit_layers(self) -> bool:
        """Whether the linear maps of all layers are 4-bit integers in symmetric groups of neighbours."""
        expected = {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False}
        return {key: self._settings.get(key) for key in expected} == expected and type(self.group_size) is int

    @property
    def group_size(self) -> Any:
        return self._settings.get("group_size")

    @property
    def _settings(self) -> dict[str, Any]:
        settings = self.config.get("quantization_config")
        return settings if isinstance(settings, dict) else {}

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").exists()
