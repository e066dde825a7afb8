"""The command `chairlift`, also `python -m chairlift`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from chairlift.terminal.streams import guard_streams


def main() -> None:
    guard_streams()
    with _engine_process_ahead(sys.argv[1:]):
        from chairlift.cli.main import main as run

        run()


def _engine_process_ahead(arguments: list[str]) -> AbstractContextManager[None]:
    """For `chairlift serve`, start the engine's process before the command line is imported and read."""
    if arguments[:1] != ["serve"] or any(word == "-h" or word.startswith("--help") for word in arguments):
        return nullcontext()
    from chairlift.server.process.this_process import engine_process_ahead

    return engine_process_ahead()


if __name__ == "__main__":
    main()
