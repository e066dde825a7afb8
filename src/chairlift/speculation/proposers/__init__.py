"""The choices of `speculate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.registry import Registry

if TYPE_CHECKING:  # the base imports the choices
    from chairlift.speculation.proposers.base import ProposerFactory

PROPOSERS: Registry[type[ProposerFactory]] = Registry("speculate", __name__, grouped=True)
