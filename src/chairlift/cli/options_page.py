"""Writes what is generated from the declared options: `python -m chairlift.cli.options_page docs/options.md`.

The other file is the module with the types of the keywords of `LLM`, src/chairlift/engine_keywords.py.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from chairlift.cli.app import VARIABLES
from chairlift.cluster.options import ClusterOptions
from chairlift.config import EngineConfig
from chairlift.options import FIXED_OPTIONS, Option, options_of
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import ChatOptions, EngineOptions, SamplingOptions, SearchOptions

INTRODUCTION = """\
# Options

This page is generated from the declarations in the code (`make options-page`); do not edit it.

An option can be set in four ways. The first of them that sets it wins:

1. on the command line: `chairlift serve --max-batch-tokens 512`
2. by an environment variable, `CHAIRLIFT_` and the option's name: `CHAIRLIFT_MAX_BATCH_TOKENS=512 chairlift serve`
3. in a YAML or TOML file: `chairlift serve --config server.yaml`, where the file has lines such as
   `max_batch_tokens: 512`
4. by its default

In Python, `LLM` and `EngineConfig` take the engine's options as arguments: `LLM("smollm2-135m", max_batch_tokens=512)`.
They read neither variables nor files.

Names in files, variables and Python have `_` where the command line has `-`. In a file, an option that may be repeated
is a list, `tenant_weights` may also be a mapping, and names that the command does not have are errors. A flag such as
`--prefix-caching` is turned off with `--no-prefix-caching`, or with `prefix_caching: false` in a file. An empty
variable counts as not set. A variable that begins with `CHAIRLIFT_` and is none of those on this page gives a warning,
or is refused if it looks like one about access, without which the server would be open.

In a Kubernetes cluster, a service that is called `chairlift` sets `CHAIRLIFT_PORT` in every container. Give the service
another name, or set `enableServiceLinks: false`. Those of services with longer names (`chairlift-batch`) are ignored.

vLLM's names for these options are accepted too, in Python, in files and on the command line.

Shell completion of commands, options and choices: `chairlift --install-completion`.
"""

SECTIONS: Sequence[tuple[str, str, type]] = (
    ("The engine", "For every command that runs a model, and for `LLM` (all but `model` and `quiet`).", EngineOptions),
    ("The server", "Of `chairlift serve` and `chairlift cluster serve`.", ServerOptions),
    ("The fleet", "Of `chairlift cluster serve`.", ClusterOptions),
    (
        "Sampling",
        "For `chairlift generate`, `chat` and `run`. Without `--max-tokens`, an answer of the last two has at most "
        "1,024 tokens (what fits in the context if the model reasons), and a completion 256.",
        SamplingOptions,
    ),
    ("The chat", "Of `chairlift chat` and `chairlift run`.", ChatOptions),
    ("Search", "Of `chairlift generate`.", SearchOptions),
)

OTHER_VARIABLES = "## Other environment variables\n\n| variable | meaning |\n|---|---|\n"


def options_page() -> str:
    parts = [INTRODUCTION]
    for title, use, declared in SECTIONS:
        parts.append(f"## {title}\n\n{use}\n")
        groups: dict[str, list[Option]] = {}
        for option in options_of(declared):
            groups.setdefault(option.group, []).append(option)
        for group, options in groups.items():
            heading = f"### {group}\n\n" if len(groups) > 1 else ""
            parts.append(heading + _table(options))
    variables = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in VARIABLES.items())
    return "\n".join([*parts, OTHER_VARIABLES + variables])


def _table(options: Sequence[Option]) -> str:
    with_aliases = any(option.aliases or option.opposite_aliases for option in options)
    heading = ["option", "default", "meaning", *(["vLLM's name"] if with_aliases else [])]
    lines = [heading, ["---"] * len(heading)]
    for option in options:
        aliases = [f"`{name}`" for name in option.aliases]
        aliases += [f"`{name}` (the opposite)" for name in option.opposite_aliases]
        lines.append(
            [_name(option), _default(option), _meaning(option), *([", ".join(aliases)] if with_aliases else [])]
        )
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines)


def _name(option: Option) -> str:
    if not option.on_command_line:
        return f"`{option.name}` (Python only)"
    flags = f"`{option.long_flag}`" + (f", `{option.short}`" if option.short else "")
    own_name = option.long_flag.removeprefix("--").replace("-", "_")
    return flags if own_name == option.name else f"{flags} (`{option.name}` elsewhere)"


def _default(option: Option) -> str:
    if option.default_text is not None:
        return option.default_text
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return "none" if option.default is None else f"`{option.default}`"


def _meaning(option: Option) -> str:
    shown = option.choices or option.forms
    choices = f" One of {', '.join(f'`{choice}`' for choice in shown())}." if shown else ""
    accepted = f" `{option.metavar}`".replace("|", "\\|") if option.metavar and option.metavar[0] == "[" else ""
    return option.help + choices + accepted


# ---- the types of keywords -------------------------------------------------------------------------------------------

KEYWORDS_HEAD = '''\
"""The keywords of `LLM` and `AsyncLLM`, for editors and type checkers.

This module is generated from the declarations in `chairlift/config.py` (`make options-page`); do not edit it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
%sfrom typing import %sTypedDict

import torch


class EngineKeywords(TypedDict, total=False):
    """The options of `EngineConfig`, each with the names that vLLM has for it."""
'''
_WIDER_TYPES = {"dtype": "str | torch.dtype"}  # LLM accepts more than EngineConfig.


def keywords_module() -> str:
    hints = {name: hint for base in EngineConfig.__mro__ for name, hint in getattr(base, "__annotations__", {}).items()}
    imports = ["from pathlib import Path\n" * ("Path" in str(hints)), "Any, " * ("Any" in str(hints))]
    lines = [KEYWORDS_HEAD % tuple(imports)]
    for option in options_of(EngineConfig):
        lines += _keyword(option.name, hints[option.name], f"{option.help} Default: {_default(option)}.")
        for alias in option.aliases:
            lines += _keyword(alias, hints[option.name], f"vLLM's name for `{option.name}`.")
        for alias in option.opposite_aliases:
            lines += _keyword(alias, "bool", f"vLLM's name for the opposite of `{option.name}`.")
    for name, (allowed, reason) in FIXED_OPTIONS.items():
        kind = " | ".join("None" if value is None else type(value).__name__ for value in allowed)
        lines += _keyword(name, kind, f"vLLM's option, which is always {allowed[0]!r} here: {reason}.")
    return "\n".join(lines) + "\n"


def _keyword(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"    {name}: {_WIDER_TYPES.get(name, kind)}"
    text = f'"""{meaning}"""'
    yield textwrap.fill(text, 120, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


GENERATED = {"options.md": options_page, "engine_keywords.py": keywords_module}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        Path(argument).write_text(GENERATED[Path(argument).name]())
