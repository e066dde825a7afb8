"""A config.json without weights, for which random ones are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chairlift.errors import ModelNotFound, UnsupportedModel
from chairlift.loading.json_file import read_config


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
        wanted = {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False}
        return {key: self._settings.get(key) for key in wanted} == wanted and type(self.group_size) is int

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
