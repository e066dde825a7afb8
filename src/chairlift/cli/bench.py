"""`chairlift bench`: the benches of `chairlift.lab.bench` and of plugins, each imported when it is needed."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from chairlift.lab.bench.base import BENCHES, Bench
from chairlift.terminal.options import examples


class _Benches(TyperGroup):
    """Finds its commands in the registry."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(BENCHES.names())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in BENCHES.names():
            self.commands[cmd_name] = _click_command(cmd_name, BENCHES.get(cmd_name))
        return self.commands.get(cmd_name)


def _click_command(name: str, bench: Bench) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name, epilog=examples(*bench.examples))(bench.command)
    return typer.main.get_command(app)


bench_app = typer.Typer(
    cls=_Benches,
    help="Measure the engine, alone and against others.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples("chairlift bench throughput", "chairlift bench throughput --help"),
)
