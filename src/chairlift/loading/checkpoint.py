"""The common view of a checkpoint: a Hugging Face config and a stream of named tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chairlift.errors import ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    import torch

    from chairlift.loading.stored_weight import NamedWeights

PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint(ABC):
    """A config and tensors in Hugging Face's names."""

    path: Path
    format: str  # "safetensors", "gguf" or "dummy"
    config: dict[str, Any]  # It reads as config.json does: model_type, architectures, hidden_size, ...
    generation_config: dict[str, Any]  # It reads as generation_config.json does; empty if there is none.
    num_bytes: int  # size of the tensors as stored
    quantization: str | None = None  # what its weights are quantized by, in words; None if they are not

    @abstractmethod
    def names(self) -> list[str]:
        """Hugging Face tensor names, in the order of `tensors()`."""

    @abstractmethod
    def stored(self) -> NamedWeights:
        """Yield one tensor at a time, so that only one is in memory; quantized weights are as they are stored."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `stored`, with quantized weights dequantized to float32."""
        from chairlift.loading.stored_weight import dequantized

        return dequantized(self.stored())


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder with config.json and safetensors, a .gguf file, or a folder with exactly one of those."""
    path = Path(path).expanduser()
    try:
        return _open(path)
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or folder")
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in PICKLED:
        raise UnsupportedModel(_convert(path))
    if path.suffix == ".safetensors":
        raise UnsupportedModel(
            f"{path}: a safetensors model also needs its config.json: give the folder, {path.parent}"
        )
    raise UnsupportedModel(f"{path}: is neither a .gguf file nor a folder with config.json and .safetensors files")


def _open_folder(folder: Path) -> Checkpoint:
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        from chairlift.loading.safetensors_checkpoint import SafetensorsCheckpoint

        return SafetensorsCheckpoint(folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    if ggufs:
        names = ", ".join(path.name for path in ggufs)
        raise UnsupportedModel(f"{folder}: has {len(ggufs)} GGUF files, give the path of one: {names}")
    if any(path.suffix in PICKLED for path in folder.iterdir()):
        raise UnsupportedModel(_convert(folder))
    raise ModelNotFound(f"{folder}: has no .safetensors and no .gguf file")


def _open_gguf(path: Path) -> Checkpoint:
    from chairlift.loading.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _convert(path: Path) -> str:
    return (
        f"{path}: holds pickled weights, which can run code when they are read and are never loaded; "
        "convert them to safetensors (load the model with transformers and call save_pretrained)"
    )
