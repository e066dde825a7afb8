"""Option groups shared by several commands: engine and sampling."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from chairlift.config import EngineConfig, model_option
from chairlift.core.sampling.params import SamplingParams
from chairlift.loading.known_models import DEFAULT_MODEL
from chairlift.loading.request_defaults import RequestDefaults, parse_presets
from chairlift.options import check_options, option, option_of
from chairlift.terminal.option_groups import field_names, given, left_out, refuse_given, with_option_groups

if TYPE_CHECKING:
    from chairlift.llm import LLM


__all__ = ["EngineOptions", "SamplingOptions", "given", "refuse_given", "with_option_groups"]

sampling_option = partial(option, group="Sampling")
search_option = partial(option, group="Choosing among completions")
chat_option = partial(option, group="Conversation", common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(EngineConfig):
    """The model and the options of the engine."""

    model: str = model_option(
        DEFAULT_MODEL,
        common=True,
        help="A known name (see `chairlift models`), a .gguf file, a folder with safetensors, or a hub id.",
        short="-m",
    )
    quiet: bool = model_option(
        False, common=True, help="Print nothing but results and errors.", short="-q", negatable=False
    )
    verbose: bool = model_option(
        False,
        common=True,
        help="Say what was chosen at the start: memory, formats, limits.",
        short="-v",
        negatable=False,
    )

    def config(self) -> dict[str, Any]:
        """The arguments of `EngineConfig`."""
        return {name: value for name, value in asdict(self).items() if name in engine_option_names()}

    def check_preset(self, name: str | None) -> None:
        """Raise for a preset that there is not, before anything is loaded."""
        RequestDefaults(presets=parse_presets("presets", self.presets)).preset(name)

    def load(self) -> LLM:
        from chairlift.llm import LLM
        from chairlift.terminal.console import show_log

        show_log(quiet=self.quiet, verbose=self.verbose)
        return LLM(self.model, progress=not self.quiet, **self.config())


def engine_option_names() -> list[str]:
    """The engine's options on the command line, without --model, --quiet and --verbose."""
    return field_names(EngineConfig)


def refuse_engine_options(context: typer.Context) -> None:
    """Raise if an option of the engine was given to a command that talks to a server."""
    refuse_given(context, engine_option_names(), "is for an own engine, but --url names a server")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters; those that are left out are as in the server, except the length of the output."""

    preset: str | None = sampling_option(
        None, help="Preset of sampling parameters and of a system prompt (see --presets).", default_text="none"
    )
    temperature: float = sampling_option(
        1.0, common=True, help="Sampling temperature; 0 is greedy.", default_text="what the model recommends, else 1"
    )
    top_k: int = sampling_option(0, help="Sample from the k most likely tokens; 0 means all.")
    top_p: float = sampling_option(
        1.0, common=True, help="Sample from the most likely tokens whose probabilities sum to this."
    )
    min_p: float = sampling_option(0.0, help="Exclude tokens less likely than this fraction of the most likely one.")
    repetition_penalty: float = sampling_option(1.0, help="Values above 1 make tokens that occurred less likely.")
    presence_penalty: float = sampling_option(0.0, help="Subtracted from the logit of every token generated so far.")
    frequency_penalty: float = sampling_option(
        0.0, help="Subtracted from a token's logit for each time it was generated."
    )
    seed: int | None = sampling_option(
        None, common=True, help="Random seed, for repeatable output.", default_text="random"
    )
    max_tokens: int | None = sampling_option(256, common=True, help="Maximum length of the output, in tokens.")
    min_tokens: int = sampling_option(0, help="Minimum length of the output, in tokens.")
    stop: list[str] | None = sampling_option(
        None, common=True, help="End the output before this text; may be repeated."
    )
    ignore_eos: bool = sampling_option(False, help="Continue after the end-of-sequence token.", negatable=False)

    def params(self, **more: Any) -> SamplingParams:
        values = asdict(self)
        del values["preset"]
        return SamplingParams(**values, **more)

    def given(self, context: typer.Context) -> dict[str, Any]:
        """The values that the user has set in this context."""
        return {name: value for name, value in asdict(self).items() if not left_out(context, name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(SamplingOptions):
    """The same for conversations, with room for longer answers."""

    max_tokens: int | None = option_of(
        SamplingOptions, "max_tokens", default=None, default_text="1024; what fits if the model reasons"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a conversation shows and keeps."""

    system: str = chat_option("", help="System message.", default_text="none")
    reasoning: str = chat_option(
        "show",
        help="Whether the model's reasoning is shown, or is turned off where the model can do without.",
        choices=("show", "hide", "off"),
    )
    plain: bool = chat_option(
        False, help="Show Markdown as it is written. So do pipes, NO_COLOR and TERM=dumb.", negatable=False
    )
    history: bool = chat_option(
        True, help="Keep typed messages for the next conversation, in ~/.local/state/chairlift."
    )

    def __post_init__(self) -> None:
        check_options(self)


_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


@dataclass(frozen=True, slots=True)
class SearchOptions:
    best_of: int | None = search_option(None, help="Generate this many and show the likeliest.", default_text="all")
    beam_width: int | None = search_option(
        None, help="Beam search with this many beams, instead of sampling.", default_text="no"
    )
    length_penalty: float = search_option(1.0, help="Above 0, a beam search prefers longer texts.")
    early_stopping: str = search_option(
        "false", help="Whether a beam search stops as soon as it has enough hypotheses.", choices=tuple(_EARLY_STOPPING)
    )

    def __post_init__(self) -> None:
        check_options(self)

    def params(self) -> dict[str, Any]:
        """The parameters of `SamplingParams`."""
        return asdict(self) | {"early_stopping": _EARLY_STOPPING[self.early_stopping]}
