"""The common view of a checkpoint: a Hugging Face config and a stream of named tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from chairlift.errors import ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    import torch

    from chairlift.loading.stored_weight import StoredWeight

PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint(Protocol):
    path: Path
    format: str  # "safetensors" or "gguf"
    config: dict[str, Any]  # It reads as config.json does: model_type, architectures, hidden_size, ...
    generation_config: dict[str, Any]  # It reads as generation_config.json does; empty if there is none.
    num_bytes: int  # size of the tensors as stored
    quantization: str | None  # what its weights are quantized by, in words; None if they are not

    def names(self) -> list[str]:
        """Hugging Face tensor names, in the order of `tensors()`."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one tensor at a time, so that only one is in memory; quantized weights are dequantized."""
        ...

    def stored(self) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        """Like `tensors`, with quantized weights as they are stored."""
        ...


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
        from chairlift.loading.safetensors_checkpoint import (
            QuantizedCheckpoint,
            SafetensorsCheckpoint,
            quantized_reader,
        )

        files = SafetensorsCheckpoint(folder)
        reader = quantized_reader(files.config)
        return files if reader is None else QuantizedCheckpoint(files, reader)
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
