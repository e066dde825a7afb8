"""The examples of Hypothesis: the same whatever else is loaded, few in `make test`, more in `make test-all`."""

from __future__ import annotations

import os

from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")


def examples(repeatable: int, searching: int) -> int:
    """The number of examples of a costly test in the chosen profile."""
    return repeatable if PROFILE == "repeatable" else searching


def ignore_loaded_modules() -> None:
    """Draw no constants from the source of loaded modules. Hypothesis has no setting for it."""
    HypothesisProvider._local_constants = Constants()
