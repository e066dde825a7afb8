"""Sampling parameters: checks, and where a request is sampled."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest

from chairlift.core.sampling.parameter import SAMPLING_PARAMETERS, Stage
from chairlift.core.sampling.params import PARAMETERS, SamplingParams
from chairlift.core.sampling.structure import Structure
from chairlift.errors import InvalidParameter

ON_DEVICE: list[dict[str, Any]] = [
    {"temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 4},
    {"n": 3, "max_tokens": None, "stop": ["x"], "stop_token_ids": [4], "ignore_eos": True, "detokenize": True},
    {"beam_width": 2, "length_penalty": 0.5},
    {"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_tokens": 0},
]
ON_HOST: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
    {"logit_bias": {3: 1.0}},
    {"min_tokens": 1},
    {"logprobs": 0},
    {"structure": Structure.json_object()},
]


@pytest.mark.parametrize(
    ("given", "needs_host"), [(one, False) for one in ON_DEVICE] + [(one, True) for one in ON_HOST]
)
def test_a_request_needs_the_host_for_any_parameter_without_device_support(
    given: dict[str, Any], needs_host: bool
) -> None:
    assert SamplingParams(**given).needs_host == needs_host


def test_every_field_declares_itself_and_has_an_implementation_if_it_needs_one() -> None:
    assert [*PARAMETERS] == [field.name for field in fields(SamplingParams)]
    for name, parameter in PARAMETERS.items():
        if parameter.stage in (Stage.LOGITS, Stage.FILTER):
            assert SAMPLING_PARAMETERS.get(parameter.implementation or name).declaration is None


def test_parameters_can_be_made_from_their_fields() -> None:
    params = SamplingParams(n=2, best_of=3, max_tokens=4)
    assert SamplingParams(**asdict(params)) == params


def test_the_implementations_of_a_stage() -> None:
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, logit_bias={1: 1.0}, top_p=0.5)
    assert params.implementations(Stage.LOGITS) == ["penalties", "logit_bias"]
    assert params.implementations(Stage.FILTER) == ["top_p"]
    assert SamplingParams().implementations(Stage.LOGITS) == []


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "an integer of at least 1 and at most 128, got 0"),
    ({"n": True}, "n", "got True"),
    ({"temperature": -0.1}, "temperature", "a number of at least 0 and at most 100"),
    ({"temperature": float("nan")}, "temperature", "got nan"),
    ({"top_k": -2}, "top_k", "an integer of at least 0"),
    ({"top_p": 0.0}, "top_p", "a number above 0 and at most 1"),
    ({"min_p": 1.1}, "min_p", "at most 1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "at least 0.01"),
    ({"presence_penalty": 2.1}, "presence_penalty", "at most 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "at least -2"),
    ({"logit_bias": [1]}, "logit_bias", "must map token ids to numbers"),
    ({"logit_bias": {1: 101.0}}, "logit_bias", "at most 100"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "an integer of at least 0"),
    ({"seed": 2**63}, "seed", "at most 9223372036854775807"),
    ({"max_tokens": -1}, "max_tokens", "an integer of at least 0"),
    ({"min_tokens": 17}, "min_tokens", r"must not exceed max_tokens \(16\), got 17"),
    ({"stop": 3}, "stop", "must be a list, got int"),
    ({"stop": [""]}, "stop", "must be non-empty strings"),
    ({"stop": ["a"] * 65}, "stop", "at most 64 strings"),
    ({"stop": ["a"], "detokenize": False}, "stop", "needs detokenize=True"),
    ({"stop_token_ids": "ab"}, "stop_token_ids", "must be a list"),
    ({"ignore_eos": 1}, "ignore_eos", "must be true or false, got 1"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"structure": "a+"}, "structure", "must be a Structure, got str"),
    ({"n": 3, "best_of": 2}, "best_of", "an integer of at least 3"),
    ({"early_stopping": "soon", "beam_width": 2}, "early_stopping", "must be true, false or 'never'"),
    ({"length_penalty": 2.0}, "length_penalty", "only goes with beam_width"),
    ({"beam_width": 1}, "beam_width", "an integer of at least 2"),
    ({"beam_width": 2, "n": 3}, "n", "must not exceed beam_width"),
    ({"beam_width": 2, "temperature": 0.5}, "temperature", "must be 0 or 1 with beam_width"),
    ({"beam_width": 2, "top_k": 4}, "top_k", "is not supported with beam_width"),
    ({"beam_width": 2, "logit_bias": {1: 1.0}}, "logit_bias", "is not supported with beam_width"),
    ({"beam_width": 2, "best_of": 3}, "best_of", "is not supported with beam_width"),
    ({"beam_width": 2, "stop": "a"}, "stop", "is not supported with beam_width"),
    ({"beam_width": 2, "structure": Structure.regex("a", "guided_regex")}, "guided_regex", "is not supported with"),
]


@pytest.mark.parametrize(("given", "parameter", "problem"), INVALID, ids=lambda value: str(value)[:40])
def test_an_invalid_value_is_refused_by_name(given: dict[str, Any], parameter: str, problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem) as raised:
        SamplingParams(**given)
    assert raised.value.parameter == parameter


@pytest.mark.parametrize(
    ("name", "hint"), [("max_token", "did you mean max_tokens?"), ("zzz", "docs/python.md lists all")]
)
def test_an_unknown_name_is_refused_with_the_one_that_is_meant(name: str, hint: str) -> None:
    for make in (SamplingParams, SamplingParams().clone):
        with pytest.raises(InvalidParameter) as raised:
            make(**{name: 4})
        assert str(raised.value) == f"{name}: is not a sampling parameter; {hint}"


def test_copies_are_checked_and_equal_values_are_equal() -> None:
    params = SamplingParams(stop="a", logit_bias={3: 1.0}, best_of=1)
    assert params == SamplingParams(stop=["a"], logit_bias={3: 1.0})
    assert params.clone(top_k=-1) == params
    with pytest.raises(InvalidParameter, match="top_p"):
        params.clone(top_p=2.0)
    with pytest.raises(InvalidParameter, match="toy: is not a sampling parameter"):
        params.clone(toy=1)
