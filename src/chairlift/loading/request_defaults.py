"""What requests leave out: sampling parameters and a system prompt, and named presets of both.

The same defaults hold for the server's APIs, `LLM` and the command line. A parameter comes from the first of these that
has it: the request, its preset, `override_generation_config`, and what the model recommends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chairlift.core.sampling.params import SamplingParams, joined_defaults
from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.loading.recommended_sampling import AUTO, NAMES, default_sampling
from chairlift.options import read_mapping, read_text

# The parameters of SamplingParams that can be defaults, and other names of some of them.
DEFAULT_NAMES = (
    *(*NAMES, "presence_penalty", "frequency_penalty", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    "thinking_token_budget",
)
_ALIASES = {"max_new_tokens": "max_tokens", "stop_strings": "stop", "system": "system_prompt"}
_PRESET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# The options of EngineConfig that are about them.
OPTIONS = ("generation_config", "override_generation_config", "system_prompt", "presets")


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """The sampling parameters by name and the system prompt of requests without them, and those of each preset."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None  # Conversations without one get it.
    presets: Mapping[str, RequestDefaults] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Path, generation_config: Mapping[str, Any], options: Mapping[str, Any]) -> RequestDefaults:
        """Join what a model's generation config recommends with the `options` of EngineConfig that are given."""
        source = options.get("generation_config", AUTO)
        overrides = parse_overrides("override_generation_config", options.get("override_generation_config"))
        recommended = joined_defaults(default_sampling(model, generation_config, source), overrides)
        base = cls(recommended, options.get("system_prompt"))
        presets = parse_presets("presets", options.get("presets"))
        return replace(base, presets={name: base._with(preset) for name, preset in presets.items()})

    def _with(self, preset: RequestDefaults) -> RequestDefaults:
        system_prompt = self.system_prompt if preset.system_prompt is None else preset.system_prompt
        return RequestDefaults(joined_defaults(self.sampling, preset.sampling), system_prompt)

    def preset(self, name: str | None) -> RequestDefaults:
        """The defaults of requests that ask for a preset; None asks for none."""
        if name is None:
            return self
        if not isinstance(name, str) or name not in self.presets:
            known = f"choose from {', '.join(self.presets)}" if self.presets else "there are none; see --presets"
            raise InvalidParameter("preset", f"unknown {name!r:.100}; {known}")
        return self.presets[name]


# ---- the options ---------------------------------------------------------------------------------------------------


def parse_overrides(parameter: str, given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Parse sampling parameters: a mapping, JSON of one, or `temperature=0.5,top_p=0.9`."""
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        pairs = [pair.partition("=") for pair in given.split(",")]
        if not all(equals for _, equals, _ in pairs):
            raise InvalidParameter(parameter, f"must be JSON or NAME=VALUE,NAME=VALUE, got {given!r:.100}")
        given = {name.strip(): _value(text) for name, _, text in pairs}
    found = _parse(parameter, _mapping(parameter, given))
    if found.system_prompt is not None:
        raise InvalidParameter(parameter, "has a system prompt, which is the option system_prompt")
    return dict(found.sampling)


def parse_presets(parameter: str, given: Mapping[str, Any] | str | None) -> dict[str, RequestDefaults]:
    """Parse presets by name: a mapping, JSON of one, or the path of a YAML or TOML file."""
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        given = read_mapping(Path(given).expanduser(), parameter)
    presets: dict[str, RequestDefaults] = {}
    for name, values in _mapping(parameter, given).items():
        if not isinstance(name, str) or not _PRESET_NAME.fullmatch(name):
            raise InvalidParameter(parameter, f"{name!r:.100} is no name: use letters, digits, '-', '_' and '.'")
        if not isinstance(values, Mapping):
            raise InvalidParameter(parameter, f"{name}: must map parameters to values, got {values!r:.100}")
        presets[name] = _parse(parameter, values, f"{name}: ")
    return presets


def _mapping(parameter: str, given: Any) -> Mapping[Any, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidParameter(parameter, f"must be a mapping, or JSON of one: {error}") from None
    if given is not None and not isinstance(given, Mapping):
        raise InvalidParameter(parameter, f"must be a mapping of names to values, got {given!r:.100}")
    return given or {}


def _parse(parameter: str, given: Mapping[Any, Any], location: str = "") -> RequestDefaults:
    values = {_ALIASES.get(str(name), str(name)): value for name, value in given.items() if value is not None}
    system_prompt = values.pop("system_prompt", None)
    if system_prompt is not None and not isinstance(system_prompt, str):
        raise InvalidParameter(parameter, f"{location}system_prompt: must be a text, got {system_prompt!r:.100}")
    for name in values:
        if name not in DEFAULT_NAMES:
            known = ", ".join(DEFAULT_NAMES)
            raise InvalidParameter(parameter, f"{location}unknown {name!r:.100}; choose from {known}")
    try:
        SamplingParams(**values)
    except InvalidParameter as problem:
        raise InvalidParameter(parameter, f"{location}{problem}") from None
    return RequestDefaults(values, system_prompt)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_chat_template(file: str | Path | None, parameter: str = "chat_template") -> str | None:
    """Return the template in a file, once it is known to compile."""
    from chairlift.text.chat_template import ChatTemplate  # imported late, like the tokenizer

    if file is None:
        return None
    source = read_text(Path(file).expanduser(), parameter)
    try:
        ChatTemplate(source)
    except UnsupportedModel as error:
        raise InvalidParameter(parameter, f"cannot use {str(file)!r}: {error}") from None
    return source
