"""Makes Hypothesis generate the same examples regardless of which other tests and modules are loaded."""

from __future__ import annotations

from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants


def ignore_loaded_modules() -> None:
    """Draw no constants from the source of loaded modules. Hypothesis has no setting for it."""
    HypothesisProvider._local_constants = Constants()
