"""The traffic of `chairlift bench chunking`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter

_TRAFFIC = "Traffic"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkingSettings:
    """Long prompts and the requests that decode beside them; lengths are in tokens."""

    decodes: Annotated[int, typer.Option(help="Requests that decode all the time.", rich_help_panel=_TRAFFIC)] = 8
    start: Annotated[int, typer.Option(help="Tokens of their prompts.", rich_help_panel=_TRAFFIC)] = 32
    output: Annotated[
        int, typer.Option(help="Tokens each of them generates before a new one replaces it.", rich_help_panel=_TRAFFIC)
    ] = 512
    prompts: Annotated[int, typer.Option(help="Long prompts per setting and round.", rich_help_panel=_TRAFFIC)] = 4
    prompt_len: Annotated[int, typer.Option(help="Tokens of a long prompt.", rich_help_panel=_TRAFFIC)] = 1024
    rounds: Annotated[int, typer.Option(help="Repetitions of everything, with new engines.")] = 1
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.", rich_help_panel=_TRAFFIC)] = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name == "seed" else 1):
                raise InvalidParameter(name, f"must be at least {0 if name == 'seed' else 1}, got {value}")
