"""`chairlift bench`: the benches of `chairlift_lab.bench` and of plugins, each imported when it is needed."""

from __future__ import annotations

from typing import Any

import typer

from chairlift.cli.app import UNDERSTAND, app
from chairlift.terminal.commands import CommandGroup, Commands
from chairlift_lab.bench.base import BENCHES, Bench


class _Benches(CommandGroup):
    """Finds its commands in the registry."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(BENCHES.names())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in BENCHES.names():
            self.commands[cmd_name] = _click_command(cmd_name, BENCHES.get(cmd_name))
        return self.commands.get(cmd_name)


def _click_command(name: str, bench: Bench) -> Any:
    app = Commands()
    app.command(name, examples=bench.examples)(bench.command)
    return typer.main.get_command(app)


bench_app = Commands(
    cls=_Benches,
    help="Measure the engine, alone and against others.",
    examples=["chairlift bench throughput", "chairlift bench throughput --help"],
)
app.add_typer(bench_app, name="bench", rich_help_panel=UNDERSTAND)
