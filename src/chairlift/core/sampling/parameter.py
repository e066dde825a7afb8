"""Declarations of sampling parameters: valid values, the neutral value, and the stage that applies them.

The fields of SamplingParams are declared with `declared`. A parameter of a plugin registers an implementation (see
`sampling/parameters/base.py`) that carries its own declaration; its values are passed as `SamplingParams.extra_args`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from chairlift.errors import InvalidParameter
from chairlift.registry import Registry

Check = Callable[[str, Any], None]  # (name, value): raises InvalidParameter


class Stage(StrEnum):
    """The part of generation that a parameter acts on."""

    LOGITS = "logits"  # edits the logits of a row; implemented in sampling/parameters/
    FILTER = "filter"  # excludes tokens by their probability; implemented in sampling/parameters/
    GRAMMAR = "grammar"  # masks tokens; implemented in structured/
    DRAW = "draw"  # temperature and seed
    LOGPROBS = "logprobs"  # what is reported about a sampled token
    REQUEST = "request"  # outside the sampler: number of completions, stop conditions, text


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """The declaration of one parameter, which decides where a request with a non-neutral value is sampled."""

    neutral: Any  # the value that has no effect
    check: Check
    stage: Stage
    on_device: bool = False  # whether the sampling kernel implements it; otherwise the host samples the request
    with_beams: bool = False  # whether beam search accepts it
    implementation: str | None = None  # name in SAMPLING_PARAMETERS, if it differs from the parameter's name

    @property
    def needs_host(self) -> bool:
        """Whether a request with a non-neutral value must be sampled by the host."""
        return self.stage is not Stage.REQUEST and not self.on_device


class Implementation(Protocol):
    """An entry of SAMPLING_PARAMETERS: a LogitsEdit or a ProbabilityFilter of sampling/parameters/base.py."""

    declaration: ClassVar[SamplingParameter | None]  # None for fields of SamplingParams, which are declared there


SAMPLING_PARAMETERS: Registry[Implementation] = Registry(
    "sampling parameter", "chairlift.sampling.parameters", grouped=True
)


def extra_parameter(name: str) -> SamplingParameter:
    """Look up the declaration of a plugin's parameter."""
    implementation = SAMPLING_PARAMETERS.registered().get(name)
    if implementation is None or implementation.declaration is None:
        raise InvalidParameter(name, "is not a sampling parameter")
    return implementation.declaration


def extra_parameter_names() -> list[str]:
    """The names of all parameters of plugins."""
    registered = SAMPLING_PARAMETERS.registered()
    return [name for name, implementation in registered.items() if implementation.declaration is not None]


def declared(default: Any, check: Check, stage: Stage, **options: Any) -> Any:
    """Make a dataclass field with its SamplingParameter; the default is neutral unless `neutral` is given."""
    parameter = SamplingParameter(options.pop("neutral", default), check, stage, **options)
    return field(default=default, metadata={"parameter": parameter})


# ---- checks ------------------------------------------------------------------------------------------------------


def check_all(parameters: Mapping[str, SamplingParameter], values: object) -> None:
    """Check the values of all parameters, which are attributes of `values`."""
    for name, parameter in parameters.items():
        parameter.check(name, getattr(values, name))


def integer(low: int, high: int | None = None) -> Check:
    limits = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParameter(name, f"must be {limits}, got {value!r}")
        if value < low or (high is not None and value > high):
            raise InvalidParameter(name, f"must be {limits}, got {value}")

    return check


def number(low: float, high: float, *, low_open: bool = False) -> Check:
    limits = f"a number {'above' if low_open else 'of at least'} {low:g} and at most {high:g}"

    def check(name: str, value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN is in no range, and integers of any size can be compared.
        if not is_number or not low <= value <= high or (low_open and value == low):
            raise InvalidParameter(name, f"must be {limits}, got {value!r:.100}")

    return check


def boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidParameter(name, f"must be true or false, got {value!r}")


def instance_of(expected: type) -> Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, expected):
            raise InvalidParameter(name, f"must be a {expected.__name__}, got {type(value).__name__}")

    return check


def boolean_or(word: str) -> Check:
    def check(name: str, value: Any) -> None:
        if value not in (True, False, word) or not isinstance(value, (bool, str)):
            raise InvalidParameter(name, f"must be true, false or {word!r}, got {value!r:.40}")

    return check


def texts(most: int, most_characters: int) -> Check:
    """Check a sequence of non-empty strings."""

    def check(name: str, strings: Sequence[Any]) -> None:
        if len(strings) > most:
            raise InvalidParameter(name, f"at most {most} strings, got {len(strings)}")
        if not all(isinstance(text, str) and text for text in strings):
            raise InvalidParameter(name, "must be non-empty strings")
        if sum(map(len, strings)) > most_characters:
            raise InvalidParameter(name, f"at most {most_characters} characters in all strings together")

    return check


def optional(check: Check) -> Check:
    def check_given(name: str, value: Any) -> None:
        if value is not None:
            check(name, value)

    return check_given


def each(check: Check) -> Check:
    """Check every value of a sequence with `check`."""

    def check_all(name: str, values: Sequence[Any]) -> None:
        for value in values:
            check(name, value)

    return check_all


def token_biases(low: float, high: float) -> Check:
    """Check a mapping from token ids to numbers."""
    check_token, check_bias = integer(0), number(low, high)

    def check(name: str, biases: Mapping[int, float]) -> None:
        for token, bias in biases.items():
            check_token(name, token)
            check_bias(name, bias)

    return check
