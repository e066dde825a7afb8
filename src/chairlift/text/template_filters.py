"""The filters that chat templates may use, each with bounded results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial, update_wrapper
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.utils import pass_environment

from chairlift.text.template_meter import Meter, check_format, check_product, size_of, text_of

MAX_WIDTH = 1000
_WIDTHS = frozenset(["batch", "center", "indent", "round", "slice", "tojson"])  # multiply their result by an argument
# Without those for web pages, whose cost is hard to bound.
_REFUSED = ("filesizeformat", "forceescape", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")


def bounded(filters: Mapping[str, Callable[..., Any]], meter: Callable[[], Meter]) -> dict[str, Callable[..., Any]]:
    """Return jinja's filters and templates' own `tojson`, with their work counted by the meter of the rendering."""
    own: dict[str, Callable[..., Any]] = {"tojson": to_json, "replace": _replace, "join": _join, "sum": _sum}
    own |= {"indent": _indent, "format": _format}
    chosen = {name: function for name, function in filters.items() if name not in _REFUSED} | own
    return {name: _metered(name, function, meter) for name, function in chosen.items()}


def _metered(name: str, function: Callable[..., Any], meter: Callable[[], Meter]) -> Callable[..., Any]:
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter().step()
        for given in (*args[1:], *kwargs.values()) if name in _WIDTHS else ():
            if isinstance(given, int) and abs(given) > MAX_WIDTH:
                raise SecurityError(f"the argument of {name} is too large")
        return meter().measured(function(*args, **kwargs))

    return update_wrapper(metered, function)  # Jinja's marks say what to pass as the first argument.


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as plain JSON: jinja's own filter escapes HTML and sorts the keys."""
    num_values, _ = size_of(value)
    check_product(num_values, 64 * indent if isinstance(indent, int) else len(indent or "") + 1)
    check_product(num_values, sum(map(len, separators or ())))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text, old, new = text_of(value), text_of(old), text_of(new)
    check_product(text.count(old), len(new), len(text))
    return text.replace(old, new, -1 if count is None else count)


@pass_environment
def _join(environment: Any, values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    texts = [text_of(value) for value in values]
    separator = text_of(separator)
    check_product(len(texts), len(separator), sum(map(len, texts)))
    return separator.join(texts)


@pass_environment
def _sum(environment: Any, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    add = partial(environment.call_binop, None, "+")
    for value in values:
        start = add(start, value)
    return start


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = text_of(value)
    check_product(text.count("\n") + 1, len(width) if isinstance(width, str) else width, len(text))
    return FILTERS["indent"](text, width, first, blank)  # type: ignore[no-any-return]


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    pattern = text_of(value)
    check_format(pattern, args or (kwargs,))
    return FILTERS["format"](pattern, *args, **kwargs)  # type: ignore[no-any-return]
