"""A GGUF file seen as a Hugging Face checkpoint: the names and the values of its tensors.

The converter that writes GGUF files changes three things besides the names, as families.toml says: it reorders the rows
of q and k in some families, adds one to the norms' weights in others, and stacks the experts' matrices into one tensor
[experts, out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chairlift.errors import UnsupportedModel
from chairlift.loading.checkpoint import Checkpoint
from chairlift.loading.gguf.config import GGUFFamily, families, hf_config, hf_generation_config
from chairlift.loading.gguf.file import GGUFFile, GGUFTensor, corrupt

if TYPE_CHECKING:
    from chairlift.loading.stored_weight import NamedWeights


class GGUFCheckpoint(Checkpoint):
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

    def stored(self) -> NamedWeights:
        import torch  # Config and tokenizer are read without it.

        from chairlift.loading.gguf.blocks import GGUFWeight

        for name, source in self._sources.items():
            weight = GGUFWeight(self.file, source)
            yield name, weight if len(weight.shape) == 2 else torch.from_numpy(source.read(self.file))


@dataclass(frozen=True, slots=True)
class Source:
    """Where a Hugging Face tensor comes from."""

    tensor: GGUFTensor
    expert: int | None = None  # only this slice of a stacked tensor
    interleaved_heads: int = 0  # > 0: undo the interleaving of rows for this number of heads
    offset: float = 0.0  # subtracted from the values

    def read(self, file: GGUFFile) -> NDArray[np.float32]:
        values = file.read(self.tensor, self.expert)
        if self.offset:
            values -= self.offset
        return np.ascontiguousarray(values[self.row_order(len(values))]) if self.interleaved_heads else values

    def row_order(self, rows: int) -> NDArray[np.int64]:
        """The stored row of each row."""
        order = np.arange(rows)
        if self.interleaved_heads:
            order = order.reshape(self.interleaved_heads, -1, 2).swapaxes(1, 2).reshape(rows)
        return order


_FOR_THE_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_OUTSIDE_THE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}


def sources(file: GGUFFile, config: dict[str, Any]) -> dict[str, Source]:
    """Every Hugging Face tensor of the model and its source, in file order."""
    family, by_name = families()[config["model_type"]], dict[str, Source]()
    for tensor in file.tensors.values():
        if tensor.name not in _FOR_THE_CONFIG:
            by_name.update(_sources_of(tensor, family, file, config))
    return by_name


def _sources_of(
    tensor: GGUFTensor, family: GGUFFamily, file: GGUFFile, config: dict[str, Any]
) -> Iterator[tuple[str, Source]]:
    offset = family.norm_offset if tensor.name.endswith("_norm.weight") else 0.0
    if tensor.name in _OUTSIDE_THE_LAYERS:
        yield _OUTSIDE_THE_LAYERS[tensor.name], Source(tensor, offset=offset)
        return
    words = tensor.name.split(".")
    prefix, layer, part, suffix = words if len(words) == 4 else ("", "", "", "")  # blk.<layer>.<part>.<suffix>
    if prefix == "blk" and part in family.whole_names:
        yield f"model.layers.{layer}.{family.whole_names[part]}", Source(tensor)
        return
    if prefix != "blk" or suffix not in ("weight", "bias") or part not in family.names:
        problem = f"the tensor {tensor.name!r} is not known for {config['model_type']} models"
        raise UnsupportedModel(f"{file.path}: {problem}")
    name = f"model.layers.{layer}.{family.names[part]}.{suffix}"
    if "{}" not in name:
        heads, head_dim = 0, config["head_dim"]
        if family.rotates_neighbours and part in ("attn_q", "attn_k"):
            heads = int(config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])
            if tensor.shape[0] != heads * head_dim or head_dim % 2:
                corrupt(file.path, f"{tensor.name!r} has the shape {tensor.shape} for {heads} heads of {head_dim}")
        yield name, Source(tensor, interleaved_heads=heads, offset=offset)
        return
    num_experts = config.get("num_local_experts") or config["num_experts"]
    if len(tensor.shape) != (3 if suffix == "weight" else 2) or tensor.shape[0] != num_experts:
        corrupt(file.path, f"{tensor.name!r} has the shape {tensor.shape} for {num_experts} experts")
    for expert in range(num_experts):
        yield name.format(expert), Source(tensor, expert=expert)
