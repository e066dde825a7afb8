"""Named choices that are found, not listed: one module per choice, in a package of ours or in a plugin.

A choice called `round-robin` is the module `round_robin` of the registry's package, which registers it:

    @POLICIES.register("round-robin")
    class RoundRobin(Policy): ...

A choice from outside registers itself in the same way. Its module is imported by the caller, by an entry point of the
group `chairlift.plugins`, or because CHAIRLIFT_PLUGINS names it (module names or .py files, separated by commas; the
engine process of the server inherits the variable).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from traceback import extract_tb
from types import ModuleType
from typing import ClassVar, Generic, Protocol, TypeVar, cast

from chairlift.errors import InvalidParameter

PLUGINS_VARIABLE = "CHAIRLIFT_PLUGINS"
T = TypeVar("T")
Choice = TypeVar("Choice")


class Registry(Generic[T]):
    """All choices of one parameter, by name. A module is imported when its choice is first requested."""

    def __init__(
        self, parameter: str, package: str, module: str = "", *, separator: str = "-", grouped: bool = False
    ) -> None:
        """With `module`, each choice is a folder of the package that contains a module of this name. `separator`
        replaces the underscores of module names in the names of choices. If choices are `grouped`, the package is a
        module or has modules that register several choices, and all are imported together."""
        self.parameter = parameter
        self.package = package
        self._grouped = grouped
        self._module = f".{module}" if module else ""
        self._separator = separator
        self._registered: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Choice], Choice]:
        """Return a decorator that registers an object as the choice `name`."""

        def add(choice: Choice) -> Choice:
            own_name = getattr(choice, "name", name)
            from_outside = not getattr(choice, "__module__", "").startswith(self.package)
            if self._registered.get(name, choice) is not choice:
                problem = f"is registered twice: {self._registered[name]!r} and {choice!r}"
            elif own_name != name:
                problem = f"calls itself {own_name!r}: {choice!r}"
            elif from_outside and not self._grouped and name in self._own_names():  # It may not be imported yet.
                problem = f"is a choice of {self.package}: take another name"
            else:
                self._registered[name] = cast(T, choice)
                _plugins.num_registered += 1
                return choice
            raise ValueError(f"{self.parameter} {name!r} {problem}")

        return add

    def names(self) -> tuple[str, ...]:
        """All names, in alphabetical order. Imports plugins, but modules of the package only if they are grouped."""
        load_plugins()
        own = self._own_names()
        return tuple(sorted({*self._registered, *own}))

    def registered(self) -> Mapping[str, T]:
        """The choices that plugins and modules imported so far have registered. Imports no module of the package."""
        load_plugins()
        return self._registered

    def get(self, name: str) -> T:
        """The choice `name`; raises InvalidParameter with all choices if there is none."""
        if name not in self._registered:
            if name not in self.names():
                choices = ", ".join(self.names())
                raise InvalidParameter(self.parameter, f"unknown {self.parameter} {name!r}; choose from {choices}")
            if name not in self._registered:
                import_module(f"{self.package}.{name.replace(self._separator, '_')}{self._module}")
        return self._registered[name]

    def _own_names(self) -> list[str]:
        """The names of modules that may not be imported yet."""
        if self._grouped:
            for group in iter_modules(getattr(import_module(self.package), "__path__", ())):
                import_module(f"{self.package}.{group.name}")
            return []
        spec = find_spec(self.package)
        assert spec is not None
        modules = [module.name for module in iter_modules(spec.submodule_search_locations)]
        return [name.replace("_", self._separator) for name in modules if name != "base" and not name.startswith("_")]


@dataclass(slots=True)
class _Plugins:
    """The plugins of this process."""

    sources: dict[str, list[Path]] = field(default_factory=dict)  # the files of each one whose import has begun
    problem: InvalidParameter | None = None
    num_registered: int = 0  # choices of all registries
    idle: list[str] = field(default_factory=list)  # the ones that register nothing


_plugins = _Plugins()


def load_plugins() -> None:
    """Import the plugins named by CHAIRLIFT_PLUGINS and by installed packages, once.

    Raises the same InvalidParameter at every call if one of them cannot be imported.
    """
    if _plugins.problem is None:
        try:
            _import_plugins()
        except InvalidParameter as problem:
            _plugins.problem = problem
    if _plugins.problem is not None:
        raise _plugins.problem


def plugin_sources() -> list[Path]:
    """The files of all plugins."""
    load_plugins()
    return [file for files in _plugins.sources.values() for file in files]


def idle_plugins() -> list[str]:
    """The names of plugins that register nothing."""
    load_plugins()
    return _plugins.idle


@cache
def _import_plugins() -> None:
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS_VARIABLE, "").split(","))):
        _import_plugin(name, PLUGINS_VARIABLE)
    for entry_point in entry_points(group="chairlift.plugins"):
        _import_plugin(entry_point.module, f"plugin {entry_point.name}")


def _import_plugin(name: str, source: str) -> None:
    if name in _plugins.sources:  # its import has begun, and requires a registry
        return
    _plugins.sources[name] = []
    registered, is_new = _plugins.num_registered, name not in sys.modules
    try:
        module = _import_file(name) if name.endswith(".py") else import_module(name)
    except Exception as error:
        problem = str(error)
        if not isinstance(error, ImportError | SyntaxError):  # those say where they are
            ours = (str(Path(__file__).parent), "<")  # A check of ours is not where the mistake is.
            frames = extract_tb(error.__traceback__)
            frame = ([each for each in frames if not each.filename.startswith(ours)] or frames)[-1]
            problem = f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        raise InvalidParameter(source, f"cannot import {name!r}: {problem}") from error
    _plugins.sources[name] = _source_files(module)
    # Families of models are in a dictionary.
    if is_new and _plugins.num_registered == registered and not _mentions(_plugins.sources[name], "FAMILIES"):
        _plugins.idle.append(name)


def _mentions(files: list[Path], word: str) -> bool:
    return any(word in file.read_text(errors="replace") for file in files)


def _import_file(name: str) -> ModuleType:
    path = Path(name)
    spec = spec_from_file_location(f"chairlift_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError("there is no such file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _source_files(module: ModuleType) -> list[Path]:
    """The file of a module, or all files of a package."""
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    own = [] if module.__file__ is None else [Path(module.__file__)]
    return [file for folder in folders for file in sorted(folder.rglob("*.py"))] or own


class TakesOptions(Protocol):
    """A class that declares which options of the engine's config its constructor takes as keywords."""

    options: ClassVar[frozenset[str]]


C = TypeVar("C", bound=TakesOptions)


def make_choice(registry: Registry[type[C]], name: str, given: Mapping[str, object], *arguments: object) -> C:
    """Build the choice `name` from `arguments` and those options in `given` that are not None; raise for one that it
    does not take."""
    choice = registry.get(name)
    options = {option: value for option, value in given.items() if value is not None}
    for option in options:
        if option not in choice.options:
            takes_it = [other for other in registry.names() if option in registry.get(other).options]
            problem = f"only goes with {registry.parameter} {' or '.join(takes_it)}, not {name!r}"
            raise InvalidParameter(option, problem)
    make: Callable[..., C] = choice
    return make(*arguments, **options)
