"""Where a model's files are, and its config without its weights: a folder, a file, a known name or an id of the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from chairlift.loading.config_file import MODELOPT_FILE, read_config
from chairlift.loading.embedding_config import module_folders
from chairlift.loading.fetch import fetch
from chairlift.loading.known_models import KnownModel, known_models

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights, settings and tokenizers. Nothing pickled and no code is ever fetched.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_IGNORED_HUB_FILES = ["*/*", "consolidated*"]  # other layouts of the same weights


def resolve_model(name: str, *, progress: bool = True) -> Path:
    """Return the path of a checkpoint, fetching it first if needed."""
    return _resolve(name, lambda model: fetch(model, progress=progress), lambda name: _from_hub(name, progress))


def _resolve(name: str, fetch_known: Callable[[KnownModel], Path], from_hub: Callable[[str], Path]) -> Path:
    for model in known_models():
        if model.name == name:
            return fetch_known(model)
    path = existing_path(name)
    if path is not None:
        return path
    if is_hub_id(name):
        return from_hub(name)
    raise unknown_model(name)


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def unknown_model(name: str) -> ModelNotFound:
    names = ", ".join(model.name for model in known_models())
    return ModelNotFound(
        f"no model {name!r}: give a known name ({names}), the path of a .gguf file or of a folder with "
        "config.json and .safetensors files, or a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct"
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


def _from_hub(repository: str, progress: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silence = not progress and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        folder = Path(snapshot_download(repository, allow_patterns=_HUB_FILES, ignore_patterns=_IGNORED_HUB_FILES))
        if modules := module_folders(folder):  # They come from the same commit, after which the folder is named.
            settings = [f"{each}/config.json" for each in modules]
            snapshot_download(repository, revision=folder.name, allow_patterns=settings)
    except Exception as error:  # the hub's errors and those of its HTTP library
        raise _not_on_hub(repository, error) from error
    finally:
        if silence:
            enable_progress_bars()
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFound(f"{repository!r} has no safetensors; if it has GGUF files, download one and give its path")
    return folder


def config_from_hub(repository: str) -> Path:
    """The path of a model's config.json; all that is downloaded is this and what else says how weights are stored."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        config = Path(hf_hub_download(repository, "config.json"))
        with suppress(EntryNotFoundError):
            hf_hub_download(repository, MODELOPT_FILE, revision=config.parent.name)
        return config
    except Exception as error:  # the hub's errors and those of its HTTP library
        raise _not_on_hub(repository, error) from error


def _not_on_hub(repository: str, error: Exception) -> ModelNotFound:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelNotFound(
        f"{repository!r} is not a local path and could not be downloaded from the Hugging Face hub "
        f"({first_line}); check the name and the connection, or give the path of a checkpoint"
    )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A config as in config.json, and what is known about the weights that belong to it."""

    config: dict[str, Any]
    quantization: str | None = None  # what the weights are quantized by, in words
    problem: str | None = None  # why quantized weights, or the tokenizer of a GGUF file, cannot be read
    num_bytes: int | None = None  # The files with weights have this many; None: they are not here
    tokenizer: str | None = None  # It describes the tokenizer of a GGUF file in words.


def read_model_config(name: str) -> ModelConfig:
    """Read the config of a model; fetches no weights."""
    path = _resolve(name, _cached, config_from_hub)
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


def _cached(model: KnownModel) -> Path:
    if not model.cached:
        raise ModelNotFound(f"{model.name} is not fetched yet; any command that runs it does, such as chairlift chat")
    return model.path
