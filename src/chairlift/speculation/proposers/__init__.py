"""The choices of `speculate`, one module each."""

from __future__ import annotations

from chairlift.registry import Registry
from chairlift.speculation.proposers.base import ProposerFactory

PROPOSERS = Registry[type[ProposerFactory]]("speculate", "chairlift.speculation.proposers")
