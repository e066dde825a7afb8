"""A stub of the package ik_llama_cpp: a context that only remembers which tokens each sequence has."""

from __future__ import annotations

from typing import Any

from ik_llama_cpp._internals import IkModel


class IkLlama:
    def __init__(self, path: str, **options: Any) -> None:
        self._model, self._has_vnni = IkModel(), False
