"""Resolving the name of a model to its files: a known short name, a path, or an id on the Hugging Face hub."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from chairlift.errors import ModelNotFound
from chairlift.loading.embedding_config import module_folders
from chairlift.loading.fetch import fetch
from chairlift.loading.json_file import MODELOPT_FILE
from chairlift.loading.known_models import known_models

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights, settings and tokenizers. Nothing pickled and no code is ever fetched.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_IGNORED_HUB_FILES = ["*/*", "consolidated*"]  # other layouts of the same weights


def resolve_model(name: str, *, progress: bool = True) -> Path:
    """Return the path of a checkpoint, fetching it first if needed."""
    for model in known_models():
        if model.name == name:
            return fetch(model, progress=progress)
    path = existing_path(name)
    if path is not None:
        return path
    if is_hub_id(name):
        return _from_hub(name, progress)
    raise unknown_model(name)


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def unknown_model(name: str) -> ModelNotFound:
    known = ", ".join(model.name for model in known_models())
    return ModelNotFound(
        f"no model {name!r}: give a known name ({known}), the path of a .gguf file or of a folder with "
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
        if modules := module_folders(folder):  # of the same commit, after which the folder is named
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
    return ModelNotFound(
        f"{repository!r} is not a local path and could not be downloaded from the Hugging Face hub "
        f"({_first_line(error)}); check the name and the connection, or give the path of a checkpoint"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
