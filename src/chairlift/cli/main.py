"""The entry point of the command line. Fast to import: commands import torch when they run."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from chairlift.cli import (  # noqa: F401 (importing a command's module registers it)
    batch,
    compile,
    generate,
    models,
    record,
    serve,
)
from chairlift.cli.app import RUN, app
from chairlift.cli.chat import command as chat  # noqa: F401
from chairlift.cli.cluster.commands import cluster_app

LABORATORY = "chairlift_lab"

app.add_typer(cluster_app, name="cluster", rich_help_panel=RUN)


def _add_laboratory() -> None:
    """Import the modules that register the laboratory's commands, where it is installed."""
    if find_spec(LABORATORY) is not None:
        commands = import_module(f"{LABORATORY}.commands")
        for module in iter_modules(commands.__path__):
            import_module(f"{commands.__name__}.{module.name}")


_add_laboratory()


def main() -> None:
    app(prog_name="chairlift")
