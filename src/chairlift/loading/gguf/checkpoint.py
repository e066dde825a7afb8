"""A GGUF file seen as a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from chairlift.loading.gguf.config import hf_config, hf_generation_config
from chairlift.loading.gguf.file import GGUFFile
from chairlift.loading.gguf.names import sources

if TYPE_CHECKING:
    import torch

    from chairlift.loading.stored_weight import StoredWeight


class GGUFCheckpoint:
    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile(path)
        self.config = hf_config(self.file)
        self.generation_config = hf_generation_config(self.file)
        kinds = {self.file.kind(tensor) for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        blocks = sorted(kinds - {"F32", "F16", "BF16"})
        self.quantization = f"GGUF, {', '.join(blocks)}" if blocks else None
        self.num_bytes = sum(tensor.num_bytes for tensor in self.file.tensors.values())
        self._sources = sources(self.file, self.config)

    def names(self) -> list[str]:
        return list(self._sources)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor dequantized to float32, one at a time."""
        from chairlift.loading.stored_weight import dequantized

        return dequantized(self.stored())

    def stored(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        import torch  # Config and tokenizer are read without it.

        from chairlift.loading.gguf.blocks import GGUFWeight

        for name, source in self._sources.items():
            weight = GGUFWeight(self.file, source)
            yield name, weight if len(weight.shape) == 2 else torch.from_numpy(source.read(self.file))
