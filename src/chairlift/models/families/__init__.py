"""The model families, one module for each kind; every module of this folder is imported and adds to `FAMILIES`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from chairlift.models.families.base import FAMILIES, Family, find_family

__all__ = ["FAMILIES", "Family", "find_family"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
