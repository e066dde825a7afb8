"""bitsandbytes: 4-bit floats (nf4, fp4) and 8-bit integers, dequantized when they are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from chairlift.errors import CorruptCheckpoint
from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.base import QuantizedReader, by_suffix

if TYPE_CHECKING:
    from torch import Tensor

    from chairlift.loading.stored_weight import StoredWeight

_STATE = "quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", f"{_STATE}nf4", f"{_STATE}fp4")


@READERS.register("bitsandbytes")
class BitsAndBytesReader(QuantizedReader):
    name = "bitsandbytes"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._four = bool(config.get("load_in_4bit", config.get("_load_in_4bit")))
        if not self._four and not config.get("load_in_8bit", config.get("_load_in_8bit")):
            raise self.refuse("its quantization_config has neither load_in_4bit nor load_in_8bit")

    def description(self) -> str:
        return f"bitsandbytes, {self.config.get('bnb_4bit_quant_type', '4-bit') if self._four else '8-bit integers'}"

    def weights(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        if not self._four:
            return by_suffix(names, ("weight", "SCB"), ("weight_format",))
        weights: dict[str, dict[str, str]] = {}
        for name in names:
            for part in _PARTS:
                if name.endswith(f".weight.{part}"):
                    weights.setdefault(name.removesuffix(f".{part}"), {})[part] = name
        for weight, parts in weights.items():
            parts["weight"] = weight
        return weights

    def read(self, weight: str, parts: Mapping[str, Tensor]) -> StoredWeight:
        from chairlift.loading.stored_weight import PlainValues, ScaledFloats

        if not self._four:
            scales = parts["SCB"].float().reshape(-1, 1) / 127
            return ScaledFloats(parts["weight"], scales, (1, parts["weight"].shape[1]))
        state = _state(weight, parts)
        codes = parts["weight"].flatten()
        numbers = torch.stack((codes >> 4, codes & 15), dim=1).flatten().long()
        absmax = _absmax(parts, state).repeat_interleave(int(state["blocksize"]))
        shape = torch.Size(state["shape"])
        if shape.numel() > min(len(numbers), len(absmax)):
            raise CorruptCheckpoint(f"{weight}: holds {len(numbers)} numbers for the shape {list(shape)}")
        values = parts["quant_map"].float()[numbers[: shape.numel()]] * absmax[: shape.numel()]
        return PlainValues(values.reshape(shape))


def _state(weight: str, parts: Mapping[str, Tensor]) -> dict[str, Any]:
    packed = next((tensor for part, tensor in parts.items() if part.startswith(_STATE)), None)
    try:
        assert packed is not None
        state: dict[str, Any] = json.loads(bytes(packed.tolist()))
        return {key: state[key] for key in ("blocksize", "shape")} | state
    except (AssertionError, ValueError, KeyError, TypeError):
        raise CorruptCheckpoint(f"{weight}: its quant_state is missing or damaged") from None


def _absmax(parts: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """The largest number of each block, which may be quantized itself."""
    absmax = parts["absmax"]
    if "nested_absmax" not in parts:
        return absmax.float()
    nested = parts["nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
    return parts["nested_quant_map"].float()[absmax.long()] * nested + float(state["nested_offset"])
