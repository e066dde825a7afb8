"""The choices of `speculate`, one module each."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.registry import Registry
from chairlift.speculation.proposers.base import ProposerFactory

PROPOSERS = Registry[Callable[[str], ProposerFactory]]("speculate", "chairlift.speculation.proposers")
