"""The environment variables of the project; others that begin like them are refused, as unknown options are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from chairlift.cluster.options import ClusterOptions
from chairlift.errors import InvalidParameter
from chairlift.options.declaration import options_of
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions, SamplingOptions
from chairlift.terminal.search_options import SearchOptions

PREFIX = "CHAIRLIFT_"
GROUPS = (EngineOptions, ServerOptions, ClusterOptions, SamplingOptions, SearchOptions)

VARIABLES: Mapping[str, str] = {
    "CHAIRLIFT_API_KEY": "for `serve` a key to require besides those of `--api-key`; for others the key to send",
    "CHAIRLIFT_CACHE": "the folder for fetched models, packed weights and the compiled kernels of CPUs",
    "CHAIRLIFT_DEBUG": "`1` shows errors with their traceback",
    "CHAIRLIFT_PLUGINS": "modules or .py files with own policies, orderings, backends, …; separated by commas",
}
# Read by the examples, the tests and the files in deploy/.
TOOL_VARIABLES = frozenset(
    {
        "CHAIRLIFT_EXAMPLE_MODEL",
        "CHAIRLIFT_EXAMPLE_PORT",
        "CHAIRLIFT_LM_EVAL_PYTHON",
        "CHAIRLIFT_OPENAI_AGENTS_PYTHON",
        "CHAIRLIFT_REQUIRE_TOOLS",
        "CHAIRLIFT_SMG",
        "CHAIRLIFT_VARIANT",
    }
)
# What Kubernetes sets in every container for a service whose name begins with "chairlift".
_SERVICE_VARIABLE = re.compile(r"(?:_SERVICE_HOST|_SERVICE_PORT(?:_\w+)?|_PORT(?:_\d+_\w+)?)$")


def known_variables() -> set[str]:
    """All variables that have a meaning."""
    of_options = {option.variable for group in GROUPS for option in options_of(group) if option.on_command_line}
    return {*VARIABLES, *TOOL_VARIABLES, *(variable for variable in of_options if variable is not None)}


def check_environment(environment: Iterable[str]) -> None:
    """Raise InvalidParameter for a variable that looks like one of the project and is none."""
    own = {name for name in environment if name.startswith(PREFIX)}
    known = known_variables()
    for name in sorted(own - known):
        if _is_of_a_service(name, own):
            continue
        close = get_close_matches(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], n=1)
        suggestion = f"did you mean {PREFIX}{close[0]}?" if close else "docs/options.md lists all"
        raise InvalidParameter(name, f"is not a variable of Chairlift; {suggestion}")


def _is_of_a_service(name: str, environment: set[str]) -> bool:
    found = _SERVICE_VARIABLE.search(name)
    return found is not None and f"{name[: found.start()]}_SERVICE_HOST" in environment
