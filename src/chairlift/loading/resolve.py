"""Where a model's files are, and its config without its weights: a folder, a file, a known name or an id of the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from chairlift.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from chairlift.loading.config_file import read_config
from chairlift.loading.fetch import fetch
from chairlift.loading.hub import config_from_hub, fetch_from_hub
from chairlift.loading.known_models import KnownModel, WheelModel, cached_folder, known_model, known_models

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name: str, *, progress: bool = True) -> Path:
    """Return the path of a checkpoint, fetching it first if needed."""
    known = known_model(name)
    if known is not None and known.name == name:
        if isinstance(known, WheelModel):
            return fetch(known, progress=progress)
        return fetch_from_hub(known.hub_id, progress=progress)
    path = existing_path(name)
    if path is not None:
        return path
    if is_hub_id(name):
        return fetch_from_hub(name, progress=progress)
    raise unknown_model(name)


def stored_path(model: KnownModel) -> Path | None:
    """Where a known model is on this machine, if it is."""
    if isinstance(model, WheelModel):
        return model.path if model.cached else None
    return cached_folder(model.hub_id)


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def unknown_model(name: str) -> ModelNotFound:
    names = [model.name for model in known_models()]
    close = get_close_matches(name.lower().replace(":", "-").replace("_", "-"), names, n=1)
    hint = f"did you mean {close[0]}? Else " if close else ""
    return ModelNotFound(
        f"no model {name!r}: {hint}give a known name ({', '.join(names)}), the path of a .gguf file or of a folder "
        "with config.json and .safetensors files, or a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct"
    )


def existing_path(name: str) -> Path | None:
    """The path that `name` is, if there is something."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None  # the empty path would be the current folder
    except RuntimeError:  # "~name" of an unknown user
        return None
    except OSError as error:  # too long for a path, or in an unreadable folder
        raise ModelNotFound(f"model {name[:100]!r} cannot be opened: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A config as in config.json, and what is known about the weights that belong to it."""

    config: dict[str, Any]
    quantization: str | None = None  # what the weights are quantized by, in words
    problem: str | None = None  # why quantized weights, or the tokenizer of a GGUF file, cannot be read
    num_bytes: int | None = None  # The files with weights have this many; None: they are not here
    tokenizer: str | None = None  # It describes the tokenizer of a GGUF file in words.
    folder: Path | None = None  # A safetensors checkpoint that is here lies there.


def read_model_config(name: str) -> ModelConfig:
    """Read the config of a model; fetches no weights."""
    path = _config_path(name)
    if path is None:
        known = known_model(name)
        assert known is not None
        return ModelConfig(dict(known.config))
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        path = ggufs[0] if len(ggufs) == 1 and not (path / "config.json").exists() else path / "config.json"
    if not path.exists():
        raise ModelNotFound(f"{path.parent}: has no config.json and no single .gguf file")
    if path.suffix == ".gguf":
        return _read_gguf(path)
    from chairlift.loading.safetensors_checkpoint import quantization_name, quantized_reader

    config = read_config(path)
    weights = sum(file.stat().st_size for file in path.parent.glob("*.safetensors")) or None
    try:
        reader = quantized_reader(config)
    except UnsupportedModel as refusal:
        return ModelConfig(config, quantization_name(config), str(refusal), weights)
    folder = path.parent if weights is not None else None
    return ModelConfig(config, None if reader is None else reader.description(), num_bytes=weights, folder=folder)


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


def _config_path(name: str) -> Path | None:
    """Where the config of a model is; None for a known model that is not here, whose config is in the table."""
    known = known_model(name)
    if known is not None and known.name == name:
        return stored_path(known)
    path = existing_path(name)
    if path is not None:
        return path
    if not is_hub_id(name):
        raise unknown_model(name)
    return cached_folder(name) if known is not None else config_from_hub(name)
