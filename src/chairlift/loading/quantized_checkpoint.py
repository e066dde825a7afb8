"""A checkpoint whose tensors are parts of quantized weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from chairlift.errors import CorruptCheckpoint, UnsupportedModel
from chairlift.loading.quantized import READERS
from chairlift.loading.safetensors_checkpoint import SafetensorsCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.quantized.base import QuantizedReader
    from chairlift.loading.stored_weight import StoredWeight

UNUSED_SCALES = (".k_scale", ".v_scale")  # of an 8-bit KV cache: ours holds 8-bit floats without scales


class QuantizedCheckpoint:
    """Puts the parts of quantized weights together; all other tensors are passed on."""

    def __init__(self, files: SafetensorsCheckpoint, reader: QuantizedReader) -> None:
        self.path, self.format, self.num_bytes = files.path, files.format, files.num_bytes
        self.config, self.generation_config = files.config, files.generation_config
        self.quantization: str | None = reader.description()
        self._files = files
        self._reader = reader
        names = files.names()
        self._weights = reader.weights(names)
        self._weight_of = {
            name: (weight, part) for weight, parts in self._weights.items() for part, name in parts.items()
        }
        if not self._weights:
            raise CorruptCheckpoint(
                f"{self.path}: config.json says it is quantized, but no tensor is ({names[:3]} ...)"
            )

    def names(self) -> list[str]:
        """The weights in the order in which their first parts are stored."""
        names = (name for name in self._files.names() if not name.endswith(UNUSED_SCALES))
        return list(dict.fromkeys(self._weight_of.get(name, (name, ""))[0] for name in names))

    def stored(self) -> Iterator[tuple[str, Tensor | StoredWeight]]:
        """Yield a weight when its last part is read."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._files.tensors():
            if name.endswith(UNUSED_SCALES):
                continue
            if name not in self._weight_of:
                yield name, tensor
                continue
            weight, part = self._weight_of[name]
            parts = waiting.setdefault(weight, {})
            parts[part] = tensor
            if len(parts) == len(self._weights[weight]):
                yield weight, self._read(weight, waiting.pop(weight))

    def _read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        try:
            return self._reader.read(weight, parts)
        except (
            RuntimeError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # parts of any shape and type
            shapes = ", ".join(f"{part} {list(tensor.shape)} {tensor.dtype}" for part, tensor in parts.items())
            raise CorruptCheckpoint(f"{weight}: its parts do not fit together ({shapes}): {error}") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight dequantized to float32."""
        from chairlift.loading.stored_weight import dequantized

        return dequantized(self.stored())


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
    """ModelOpt's settings may name no method, or the one that comes closest to a part of the weights."""
    if not isinstance(settings, Mapping):
        return settings
    return "modelopt" if settings.get("quant_algo") else settings.get("quant_method")
