"""NVIDIA's ModelOpt: 8-bit floats with a scale per tensor or per output channel.

Its settings are in config.json or in a file of their own, hf_quant_config.json; they name an algorithm for weights and
one for the KV cache, whose scales are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.loading.quantized import READERS
from chairlift.loading.quantized.fp8 import FP8Reader

_ALGORITHMS = {"FP8": "a scale per tensor", "FP8_PER_CHANNEL_PER_TOKEN": "a scale per output channel"}
_NOT_READ = {
    "NVFP4": "4-bit floats with an 8-bit scale per 16",
    "MXFP8": "8-bit floats with a power of two per 32",
    "MIXED_PRECISION": "formats that differ between layers",
}


@READERS.register("modelopt")
class ModelOptReader(FP8Reader):
    name = "modelopt"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"quant_method": self.name})
        self._algorithm = str(config.get("quant_algo")).upper()
        if self._algorithm not in _ALGORITHMS:
            reason = next((meaning for name, meaning in _NOT_READ.items() if self._algorithm.startswith(name)), None)
            meaning = f" ({reason})" if reason else ""
            raise self.refuse(f"{self._algorithm:.60}{meaning} is not read, only {', '.join(_ALGORITHMS)}")

    def description(self) -> str:
        return f"ModelOpt {self._algorithm}, 8-bit floats with {_ALGORITHMS[self._algorithm]}"
