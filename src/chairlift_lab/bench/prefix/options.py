"""The traffic of `chairlift bench prefix`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from chairlift.errors import InvalidParameter

_CHAT, _RAG, _AGENTS = "Chat", "RAG", "Agents"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings:
    """Lengths are in tokens. The defaults take a minute or two on two cores with the default model."""

    answer: Annotated[int, typer.Option(help="Tokens generated per request.")] = 16
    message: Annotated[int, typer.Option(help="Tokens of a message, a question or a tool result.")] = 24
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0
    users: Annotated[int, typer.Option(help="Number of conversations.", rich_help_panel=_CHAT)] = 8
    turns: Annotated[int, typer.Option(help="Messages per conversation.", rich_help_panel=_CHAT)] = 4
    system: Annotated[int, typer.Option(help="Tokens of the shared system prompt.", rich_help_panel=_CHAT)] = 48
    documents: Annotated[int, typer.Option(help="Number of documents.", rich_help_panel=_RAG)] = 4
    document: Annotated[int, typer.Option(help="Tokens per document.", rich_help_panel=_RAG)] = 256
    questions: Annotated[int, typer.Option(help="Questions, each about one document.", rich_help_panel=_RAG)] = 16
    agents: Annotated[int, typer.Option(help="Number of agents.", rich_help_panel=_AGENTS)] = 8
    tools: Annotated[int, typer.Option(help="Tokens of the shared tool list.", rich_help_panel=_AGENTS)] = 384
    steps: Annotated[int, typer.Option(help="Successive calls per agent.", rich_help_panel=_AGENTS)] = 3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < (0 if name == "seed" else 1):
                raise InvalidParameter(name, f"must be at least {0 if name == 'seed' else 1}, got {value}")
