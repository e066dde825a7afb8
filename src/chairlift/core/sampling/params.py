"""The sampling parameters of a request, checked when they are created."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from typing import Any

from chairlift.core.sampling.parameter import (
    SamplingParameter,
    Stage,
    boolean,
    boolean_or,
    check_all,
    declared,
    each,
    extra_parameter,
    instance_of,
    integer,
    number,
    optional,
    texts,
    token_biases,
)
from chairlift.core.sampling.structure import Structure
from chairlift.errors import InvalidParameter

MAX_COMPLETIONS = 128
MAX_BEAM_WIDTH = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096  # The sum of all: every completion searches for them on the engine thread.
MAX_SEED = 2**63 - 1
# Below this, logits divided by the temperature may overflow, so the arg max (the limit) is sampled instead.
MIN_TEMPERATURE = 1e-5


def _check_extra_args(name: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise InvalidParameter(name, "must map parameter names to values")
    for extra, value in values.items():
        if extra in PARAMETERS:
            raise InvalidParameter(name, f"{extra} is a parameter of its own; pass it by name")
        extra_parameter(extra).check(extra, value)


class PoolingKind(StrEnum):
    MEAN = "mean"  # The mean of the hidden states of all prompt tokens.
    LAST = "last"  # the hidden state of the last prompt token
    CLS = "cls"  # the hidden state of the first prompt token


@dataclass(frozen=True, slots=True)
class Pooling:
    """The vector to return for a prompt: an embedding, or with `token_ids` the logits of these tokens after it.

    >>> SamplingParams(max_tokens=0, pooling=Pooling(PoolingKind.LAST, dimensions=256))
    """

    kind: PoolingKind = PoolingKind.MEAN
    dimensions: int | None = None  # keep only as many at the start (matryoshka embeddings), before normalising
    normalize: bool = True  # scale to length 1
    token_ids: tuple[int, ...] = ()
    labels: bool = False  # the numbers of a classifier's labels instead

    def __post_init__(self) -> None:
        if not isinstance(self.kind, PoolingKind):
            raise InvalidParameter("pooling", f"must be {' or '.join(PoolingKind)}, got {self.kind!r:.40}")
        if self.dimensions is not None and (isinstance(self.dimensions, bool) or not isinstance(self.dimensions, int)):
            raise InvalidParameter("dimensions", f"must be an integer, got {self.dimensions!r:.40}")
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidParameter("dimensions", f"must be at least 1, got {self.dimensions}")
        if not isinstance(self.normalize, bool):
            raise InvalidParameter("normalize", f"must be true or false, got {self.normalize!r:.40}")

    @classmethod
    def logits(cls, token_ids: Sequence[int]) -> Pooling:
        """The logits of these tokens after the prompt."""
        return cls(PoolingKind.LAST, normalize=False, token_ids=tuple(token_ids))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SamplingParams:
    """How to choose the next token, when to stop and what to return; immutable, and checked on creation.

    Each field declares its check, its neutral value and where it can be applied: see `core/sampling/parameter.py`.

    Parameters:
        n: completions of a prompt, 1 to 128; they share its KV blocks.
        temperature: 0 is greedy; higher values make unlikely tokens likelier.
        top_k: only the k likeliest tokens; 0 or -1: all.
        top_p: only the likeliest tokens that together have this probability.
        min_p: only tokens at least this likely, relative to the likeliest.
        repetition_penalty: above 1: tokens of the prompt and the output become less likely.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: the same, for each time that the token occurs.
        logit_bias: token id → number that is added to its logit, -100 to 100.
        seed: the same seed gives the same choices; None: random.
        max_tokens: most tokens of the output; None: until the context is full; 0: only the prompt is computed.
        min_tokens: no end before as many tokens.
        stop: a string or several that end the output.
        stop_token_ids: tokens that end the output.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: log-probabilities of the tokens and of as many alternatives, 0 to 20.
        prompt_logprobs: the same for the tokens of the prompt.
        pooling: a vector of the prompt in place of an output; `LLM.embed` sets it.
        skip_special_tokens: leave special tokens out of the text.
        visible_special_ids: special tokens that stay in the text nevertheless.
        detokenize: make text of the tokens; False: only ids.
        structure: what the output must be, a `Structure`.
        thinking_token_budget: most tokens of reasoning, after which its end marker is forced.
        best_of: generate as many completions and return the `n` with the highest mean log-probability.
        beam_width: beam search with as many beams.
        length_penalty: of beam search: the score is log-probability / length ** length_penalty.
        early_stopping: when a beam search ends: True, False or `"never"`, as in transformers.
        extra_args: values of parameters of plugins by name.
    """

    n: int = declared(1, integer(1, MAX_COMPLETIONS), Stage.REQUEST, with_beams=True)
    temperature: float = declared(1.0, number(0.0, 100.0), Stage.DRAW, on_device=True, with_beams=True)
    top_k: int = declared(0, integer(0), Stage.FILTER, on_device=True)
    top_p: float = declared(1.0, number(0.0, 1.0, low_open=True), Stage.FILTER, on_device=True)
    min_p: float = declared(0.0, number(0.0, 1.0), Stage.FILTER, on_device=True)
    repetition_penalty: float = declared(1.0, number(0.01, 100.0), Stage.LOGITS, implementation="penalties")
    presence_penalty: float = declared(0.0, number(-2.0, 2.0), Stage.LOGITS, implementation="penalties")
    frequency_penalty: float = declared(0.0, number(-2.0, 2.0), Stage.LOGITS, implementation="penalties")
    logit_bias: Mapping[int, float] | None = declared(None, optional(token_biases(-100.0, 100.0)), Stage.LOGITS)
    seed: int | None = declared(None, optional(integer(0, MAX_SEED)), Stage.DRAW, on_device=True, with_beams=True)
    max_tokens: int | None = declared(16, optional(integer(0)), Stage.REQUEST, with_beams=True)
    min_tokens: int = declared(0, integer(0), Stage.LOGITS, with_beams=True)
    stop: str | Sequence[str] | None = declared(
        None, texts(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS), Stage.REQUEST, neutral=()
    )
    stop_token_ids: Sequence[int] | None = declared(None, each(integer(0)), Stage.REQUEST, neutral=(), with_beams=True)
    include_stop_str_in_output: bool = declared(False, boolean, Stage.REQUEST, with_beams=True)
    ignore_eos: bool = declared(False, boolean, Stage.REQUEST, with_beams=True)
    logprobs: int | None = declared(None, optional(integer(0, MAX_LOGPROBS)), Stage.LOGPROBS, with_beams=True)
    prompt_logprobs: int | None = declared(None, optional(integer(0, MAX_LOGPROBS)), Stage.REQUEST)
    pooling: Pooling | None = declared(None, optional(instance_of(Pooling)), Stage.REQUEST)  # noqa: RUF009
    skip_special_tokens: bool = declared(True, boolean, Stage.REQUEST, with_beams=True)
    visible_special_ids: Sequence[int] | None = declared(
        None, each(integer(0)), Stage.REQUEST, neutral=(), with_beams=True
    )
    detokenize: bool = declared(True, boolean, Stage.REQUEST, with_beams=True)
    structure: Structure | None = declared(None, optional(instance_of(Structure)), Stage.GRAMMAR)  # noqa: RUF009
    thinking_token_budget: int | None = declared(None, optional(integer(0)), Stage.GRAMMAR)
    best_of: int | None = declared(None, optional(integer(1, MAX_COMPLETIONS)), Stage.REQUEST)
    beam_width: int | None = declared(None, optional(integer(2, MAX_BEAM_WIDTH)), Stage.REQUEST, with_beams=True)
    length_penalty: float = declared(1.0, number(-10.0, 10.0), Stage.REQUEST, with_beams=True)
    early_stopping: bool | str = declared(False, boolean_or("never"), Stage.REQUEST, with_beams=True)
    extra_args: Mapping[str, Any] | None = declared(None, optional(_check_extra_args), Stage.REQUEST, with_beams=True)

    def __new__(cls, **given: Any) -> SamplingParams:
        _check_names(given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._normalise()
        check_all(PARAMETERS, self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problem = f"must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}"
            raise InvalidParameter("min_tokens", problem)
        if self.stop_strings and not self.detokenize:
            raise InvalidParameter("stop", "needs detokenize=True: stop strings are found in the text")
        if self.best_of is not None:
            integer(self.n, MAX_COMPLETIONS)("best_of", self.best_of)
            if self.best_of == self.n:
                object.__setattr__(self, "best_of", None)  # all completions are returned, so there is nothing to rank
        self._check_beams()
        self._check_pooling()

    def __repr__(self) -> str:
        """Show what differs from the defaults."""
        values = [(one, getattr(self, one.name)) for one in fields(self)]
        usual = {one.name: (one.default, PARAMETERS[one.name].neutral) for one, _ in values}
        shown = [f"{one.name}={value!r}" for one, value in values if value not in usual[one.name]]
        return f"SamplingParams({', '.join(shown)})"

    @property
    def num_sequences(self) -> int:
        """The number of completions that are generated to return `n` of them."""
        return self.beam_width or self.best_of or self.n

    @classmethod
    def with_defaults(cls, defaults: Mapping[str, Any], **given: Any) -> SamplingParams:
        """Create parameters from those that a request gives and a model's defaults for the others. Requests that do
        not sample get no defaults that say how to: those with temperature 0 and beam searches."""
        if given.get("beam_width") is not None:
            ends = {name: defaults[name] for name in ENDS if name in defaults and PARAMETERS[name].with_beams}
            return cls(**{**ends, **given})
        return cls(**joined_defaults(defaults, given))

    def _check_pooling(self) -> None:
        if self.pooling is None:
            return
        if self.max_tokens != 0:
            raise InvalidParameter("max_tokens", "must be 0 with pooling: nothing is generated")
        for name in ("n", "prompt_logprobs", "structure", "best_of"):
            if getattr(self, name) != PARAMETERS[name].neutral:
                raise InvalidParameter(name, "does not go with pooling: nothing is generated")

    def _check_beams(self) -> None:
        if self.beam_width is None:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != PARAMETERS[name].neutral:
                    raise InvalidParameter(name, "only goes with beam_width")
            return
        if self.n > self.beam_width:
            raise InvalidParameter("n", f"must not exceed beam_width ({self.beam_width}), got {self.n}")
        if self.max_tokens == 0:
            raise InvalidParameter("max_tokens", "must be at least 1 with beam_width")
        if self.temperature not in (0.0, 1.0):
            raise InvalidParameter("temperature", "must be 0 or 1 with beam_width: beam search does not sample")
        for name, parameter in self._active():
            if not parameter.with_beams:
                shown = self.structure.parameter if name == "structure" and self.structure else name
                raise InvalidParameter(shown, "is not supported with beam_width")

    def _normalise(self) -> None:
        """Convert the accepted forms to one: tuples instead of lists, 0 instead of -1 for "off"."""
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "visible_special_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidParameter("logit_bias", "must map token ids to numbers")
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if isinstance(self.extra_args, Mapping):
            object.__setattr__(self, "extra_args", dict(self.extra_args) or None)

    # ---- where a request is sampled ------------------------------------------------------------------------------

    def value(self, name: str) -> Any:
        """The value of a field or of a plugin's parameter, which is neutral by default."""
        if name in PARAMETERS:
            return getattr(self, name)
        return (self.extra_args or {}).get(name, extra_parameter(name).neutral)

    def _active(self) -> list[tuple[str, SamplingParameter]]:
        """The parameters, extra ones included, whose values are not neutral."""
        extra = {name: extra_parameter(name) for name in self.extra_args or ()}
        return [(name, one) for name, one in (*PARAMETERS.items(), *extra.items()) if self.value(name) != one.neutral]

    def implementations(self, stage: Stage) -> list[str]:
        """The names in SAMPLING_PARAMETERS that a stage must apply to this request."""
        names = [parameter.implementation or name for name, parameter in self._active() if parameter.stage is stage]
        return [*dict.fromkeys(names)]

    @property
    def needs_host(self) -> bool:
        """Whether the host samples this request, because a non-neutral parameter lacks device support."""
        return any(parameter.needs_host for _, parameter in self._active())

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def has_masks(self) -> bool:
        """Whether the tokens that are allowed next depend on all tokens before."""
        return self.structure is not None or self.thinking_token_budget is not None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_streamable(self) -> None:
        """Raise if the completions to return are chosen only after all have finished."""
        for name in ("beam_width", "best_of"):
            if getattr(self, name) is not None:
                raise InvalidParameter(name, "cannot be streamed: completions are ranked only after all have finished")

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a checked copy with some fields changed."""
        _check_names(changes)
        return replace(self, **changes)


PARAMETERS: dict[str, SamplingParameter] = {
    one.name: one.metadata["parameter"] for one in fields(SamplingParams) if one.init
}


def _check_names(given: Iterable[str]) -> None:
    for name in given:
        if name not in PARAMETERS:
            close = get_close_matches(name, PARAMETERS, n=1)
            hint = f"did you mean {close[0]}?" if close else "docs/python.md lists all"
            raise InvalidParameter(name, f"is not a sampling parameter; {hint}")


# Parameters that say where an output ends; the defaults of these hold for greedy requests, too.
ENDS = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "thinking_token_budget")


def joined_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` and the defaults for what it leaves out; with temperature 0 it leaves out no way to sample."""
    greedy = given.get("temperature") == 0
    return {name: value for name, value in defaults.items() if name in ENDS or not greedy} | {**given}


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidParameter(name, f"must be a list, got {type(value).__name__}")
    return tuple(value)
