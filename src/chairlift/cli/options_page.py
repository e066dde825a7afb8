"""Writes docs/options.md from the declared options: `python -m chairlift.cli.options_page > docs/options.md`."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.cli.app import VARIABLES
from chairlift.cluster.options import ClusterOptions
from chairlift.options import Option, options_of
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions, SamplingOptions, SearchOptions

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
variable counts as not set; a variable that begins with `CHAIRLIFT_` and is none of those on this page is an error.

In a Kubernetes cluster, a service that is called `chairlift` sets `CHAIRLIFT_PORT` in every container. Give the service
another name, or set `enableServiceLinks: false`. Those of services with longer names (`chairlift-batch`) are ignored.

vLLM's names for these options are accepted too, in Python, in files and on the command line.

Shell completion of commands, options and choices: `chairlift --install-completion`.
"""

SECTIONS: Sequence[tuple[str, str, type]] = (
    ("The engine", "For every command that runs a model, and for `LLM` (all but `model` and `quiet`).", EngineOptions),
    ("The server", "Of `chairlift serve` and `chairlift cluster serve`.", ServerOptions),
    ("The fleet", "Of `chairlift cluster serve`.", ClusterOptions),
    ("Sampling", "For `chairlift generate` and `chairlift chat`.", SamplingOptions),
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


if __name__ == "__main__":
    print(options_page(), end="")
