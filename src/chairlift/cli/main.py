"""The entry point of the command line. Fast to import: commands import torch when they run."""

from __future__ import annotations

from chairlift.cli import (  # noqa: F401 (importing a command's module registers it)
    batch,
    compile,
    explain,
    generate,
    make_model,
    models,
    profile,
    record,
    serve,
    simulate,
    train_draft,
)
from chairlift.cli.app import RUN, UNDERSTAND, app
from chairlift.cli.bench import bench_app
from chairlift.cli.chat import command as chat  # noqa: F401
from chairlift.cli.cluster.commands import cluster_app

app.add_typer(cluster_app, name="cluster", rich_help_panel=RUN)
app.add_typer(bench_app, name="bench", rich_help_panel=UNDERSTAND)


def main() -> None:
    app(prog_name="chairlift")
