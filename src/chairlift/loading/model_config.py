"""The config of a model without its weights: of a folder, a config.json, a GGUF file or an id of the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from chairlift.loading.json_file import read_config
from chairlift.loading.known_models import known_models
from chairlift.loading.resolve import config_from_hub, existing_path, is_hub_id, unknown_model


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A config as in config.json, and what is known about the weights that belong to it."""

    config: dict[str, Any]
    quantization: str | None = None  # what the weights are quantized by, in words
    problem: str | None = None  # why quantized weights, or the tokenizer of a GGUF file, cannot be read
    num_bytes: int | None = None  # of the files with weights; None if they are not here
    tokenizer: str | None = None  # of a GGUF file, in words


def read_model_config(name: str) -> ModelConfig:
    """Read the config of a model; fetches no weights."""
    path = _resolve(name)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        path = ggufs[0] if len(ggufs) == 1 and not (path / "config.json").exists() else path / "config.json"
    if not path.exists():
        raise ModelNotFound(f"{path.parent}: has no config.json and no single .gguf file")
    if path.suffix == ".gguf":
        return _read_gguf(path)
    from chairlift.loading.quantized_checkpoint import quantization_name, quantized_reader

    config = read_config(path)
    weights = sum(file.stat().st_size for file in path.parent.glob("*.safetensors")) or None
    try:
        reader = quantized_reader(config)
    except UnsupportedModel as refusal:
        return ModelConfig(config, quantization_name(config), str(refusal), weights)
    return ModelConfig(config, None if reader is None else reader.description(), num_bytes=weights)


def _read_gguf(path: Path) -> ModelConfig:
    """Read the head of a file, and build its tokenizer as loading does: that may refuse it."""
    from chairlift.loading.gguf.checkpoint import GGUFCheckpoint
    from chairlift.loading.gguf.tokenizer import describe_tokenizer
    from chairlift.loading.tokenizer import make_tokenizer

    checkpoint = GGUFCheckpoint(path)
    problem = None
    try:
        make_tokenizer(checkpoint)
    except (UnsupportedModel, CorruptCheckpoint) as refusal:
        problem = str(refusal)
    tokenizer = None if problem else describe_tokenizer(checkpoint.file)
    return ModelConfig(checkpoint.config, checkpoint.quantization, problem, checkpoint.num_bytes, tokenizer)


def _resolve(name: str) -> Path:
    for model in known_models():
        if model.name == name:
            if not model.cached:
                raise ModelNotFound(f"{name} is not fetched yet; any command that runs it does, such as chairlift chat")
            return model.path
    path = existing_path(name)
    if path is not None:
        return path
    if is_hub_id(name):
        return config_from_hub(name)
    raise unknown_model(name)
