"""The sampling parameters of requests that leave them out: those that the makers of a model recommend."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.core.sampling.params import SamplingParams
from chairlift.errors import CorruptCheckpoint, InvalidParameter
from chairlift.loading.config_file import read_json_object
from chairlift.loading.known_models import WheelModel, known_models

log = logging.getLogger("chairlift")

AUTO, NONE = "auto", "none"
NONE_OF_VLLM = "vllm"  # vLLM's name for none
FILE_NAME = "generation_config.json"
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(model: Path, generation_config: Mapping[str, Any], source: str = AUTO) -> dict[str, float]:
    """The parameters by name: what the model recommends (auto), nothing (none), or what a file or its folder has.

    A model may be wrong about its parameters, which is logged; in a file that the user names it is an error.
    """
    if source in (NONE, NONE_OF_VLLM):
        return {}
    if source != AUTO:
        return _read("generation_config", source)
    for entry in known_models():
        if isinstance(entry, WheelModel) and entry.path == model:
            return dict(entry.sampling)
    recommended = _parameters(generation_config)
    for name, value in list(recommended.items()):
        try:
            SamplingParams(**{name: value})
        except InvalidParameter as problem:
            log.warning(f"a sampling parameter that {model} recommends is not used: {problem}")
            del recommended[name]
    return recommended


def check_source(parameter: str, source: str) -> None:
    """Check the option: a file is read before anything is loaded."""
    if source not in (AUTO, NONE, NONE_OF_VLLM):
        _read(parameter, source)


def _file(source: str) -> Path:
    path = Path(source).expanduser()
    return path / FILE_NAME if path.is_dir() else path


def _read(parameter: str, source: str) -> dict[str, float]:
    try:
        config = read_json_object(_file(source))
    except CorruptCheckpoint as problem:
        raise InvalidParameter(parameter, f"must be auto, none, or a file of parameters: {problem}") from None
    parameters, eos = _parameters(config), config.get("eos_token_id")
    try:
        SamplingParams(**parameters)
        SamplingParams(stop=config.get("stop_strings"), stop_token_ids=[eos] if isinstance(eos, int) else eos)
    except InvalidParameter as problem:
        raise InvalidParameter(parameter, f"{_file(source)}: {problem}") from None
    return parameters


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters in a generation config. Where it does not sample, only the penalty has an effect."""
    parameters = {name: config[name] for name in NAMES if config.get(name) is not None}
    if config.get("do_sample") is not False:
        return parameters
    greedy = {"temperature": 0.0}
    return greedy | {name: parameters[name] for name in parameters if name == "repetition_penalty"}


def given_ends(source: str) -> dict[str, Any]:
    """The end tokens and stop strings in a file that the user names, which replace the model's."""
    if source in (AUTO, NONE, NONE_OF_VLLM):
        return {}
    config = read_json_object(_file(source))
    return {name: config[name] for name in ("eos_token_id", "stop_strings") if config.get(name) is not None}


def end_strings(model: Path, generation_config: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop strings in a generation config, which end every output."""
    given = generation_config.get("stop_strings") or ()
    try:
        return SamplingParams(stop=given).stop_strings
    except InvalidParameter as problem:
        raise CorruptCheckpoint(f"{model}: the stop_strings of its generation config are wrong: {problem}") from None


def describe_sampling(sampling: Mapping[str, Any]) -> str:
    """The parameters in words, for the startup log."""
    words = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in sampling.items()}
    return ", ".join(f"{name} {value}" for name, value in words.items())
