"""Options for choosing among several completions: best_of and beam search."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from chairlift.core.sampling.params import SamplingParams
from chairlift.options.declaration import check_options, option
from chairlift.terminal.options import SamplingOptions

_SEARCH = "Choosing among completions"
_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


@dataclass(frozen=True, slots=True)
class SearchOptions:
    best_of: int | None = option(
        None, help="Generate this many and show the likeliest.", group=_SEARCH, default_text="all"
    )
    beam_width: int | None = option(
        None, help="Beam search with this many beams, instead of sampling.", group=_SEARCH, default_text="no"
    )
    length_penalty: float = option(1.0, help="Above 0, a beam search prefers longer texts.", group=_SEARCH)
    early_stopping: str = option(
        "false",
        help="Whether a beam search stops as soon as it has enough hypotheses.",
        group=_SEARCH,
        choices=tuple(_EARLY_STOPPING),
    )

    def __post_init__(self) -> None:
        check_options(self)

    def params(self, sampling: SamplingOptions, n: int) -> SamplingParams:
        given: dict[str, Any] = asdict(sampling)
        if self.beam_width is not None:  # requires 1 for these, so replace the defaults
            for field in fields(sampling):
                if field.name in ("temperature", "top_p") and given[field.name] == field.default:
                    given[field.name] = 1.0
        return SamplingParams(
            n=n,
            best_of=self.best_of,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=_EARLY_STOPPING[self.early_stopping],
            **given,
        )
