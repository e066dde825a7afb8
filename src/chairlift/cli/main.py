"""The entry point of the command line. Fast to import: commands import torch when they run."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from chairlift.cli.app import app

LABORATORY = "chairlift_lab.commands"
COMMANDS = ("chat", "serve", "generate", "batch", "local_models", "models", "servers", "compile", "record", "cluster")


def _import_commands() -> None:
    """Import the modules of the commands, which register them, and those of the laboratory where it is installed."""
    for name in COMMANDS:  # The help lists them in this order.
        import_module(f"chairlift.cli.{name}")
    if find_spec(LABORATORY.partition(".")[0]) is not None:
        for module in iter_modules(import_module(LABORATORY).__path__):
            import_module(f"{LABORATORY}.{module.name}")


# Otherwise numba prints an escape sequence at the exit, if colorama is installed.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
_import_commands()


def main() -> None:
    app(prog_name="chairlift")
