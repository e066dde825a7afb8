"""Options of commands that choose among several completions: best_of and beam search."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Annotated, Any

import typer

from chairlift.core.sampling_params import SamplingParams
from chairlift.terminal.options import SamplingOptions

_SEARCH = "Choosing among completions"


class EarlyStopping(StrEnum):
    TRUE = "true"
    FALSE = "false"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class SearchOptions:
    best_of: Annotated[
        int | None,
        typer.Option(help="Generate so many and show the likeliest.", rich_help_panel=_SEARCH, show_default="all"),
    ] = None
    beam_width: Annotated[
        int | None,
        typer.Option(help="Beam search with so many beams, instead of sampling.", rich_help_panel=_SEARCH),
    ] = None
    length_penalty: Annotated[
        float, typer.Option(help="Above 0, a beam search prefers longer texts.", rich_help_panel=_SEARCH)
    ] = 1.0
    early_stopping: Annotated[
        EarlyStopping,
        typer.Option(help="Whether a beam search ends with enough hypotheses, or by a rule.", rich_help_panel=_SEARCH),
    ] = EarlyStopping.FALSE

    def params(self, sampling: SamplingOptions, n: int) -> SamplingParams:
        given: dict[str, Any] = asdict(sampling)
        if self.beam_width is not None:  # nothing is drawn: what was not asked for is not to be refused
            for field in fields(sampling):
                if field.name in ("temperature", "top_p") and given[field.name] == field.default:
                    given[field.name] = 1.0
        early = {EarlyStopping.TRUE: True, EarlyStopping.FALSE: False}.get(self.early_stopping, "never")
        return SamplingParams(
            n=n,
            best_of=self.best_of,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=early,
            **given,
        )
