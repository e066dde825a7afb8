"""Options under other engines' names: each is translated, or refused with the reason; none is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.options.declaration import Option

# Options of vLLM with a fixed behaviour in this engine: the accepted values, and why others are refused.
FIXED_OPTIONS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "code that comes with a model is never run"),
    "tensor_parallel_size": ((1,), "one device per engine"),
    "pipeline_parallel_size": ((1,), "one device per engine"),
    "enable_chunked_prefill": ((True, None), "prompts are always chunked to the step's budget"),
    "tokenizer_mode": (("auto",), "the tokenizer is the model's own"),
}


def translate_options(given: Mapping[str, Any], options: tuple[Option, ...]) -> dict[str, Any]:
    """Return the given values by the options' own names."""
    names = {name: option.name for option in options for name in (option.name, *option.aliases)}
    opposites = {name: option.name for option in options for name in option.opposite_aliases}
    translated: dict[str, Any] = {}
    for name, value in given.items():
        if name in FIXED_OPTIONS:
            allowed, reason = FIXED_OPTIONS[name]
            if value not in allowed:
                raise InvalidParameter(name, f"{value!r} is not supported: {reason}")
            continue
        if name in opposites:
            if not isinstance(value, bool):
                raise InvalidParameter(name, f"must be true or false, got {value!r}")
            own, value = opposites[name], not value
        elif name in names:
            own = names[name]
        else:
            known = ", ".join(option.name for option in options)
            raise InvalidParameter(name, f"is not an option; choose from {known}")
        if own in translated:
            raise InvalidParameter(name, f"{own} is given twice")
        translated[own] = value
    return translated


def alias_flags(options: tuple[Option, ...]) -> dict[str, str]:
    """Return the flags of aliases and the flag that each stands for: max-num-seqs -> max-batch-requests."""
    flags: dict[str, str] = {}
    for option in options:
        own = option.long_flag.removeprefix("--")
        flags |= {alias.replace("_", "-"): own for alias in option.aliases}
        flags |= {alias.replace("_", "-"): f"no-{own}" for alias in option.opposite_aliases}
    return flags
