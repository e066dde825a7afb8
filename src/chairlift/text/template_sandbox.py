"""The sandbox of chat templates, with limits on what a rendering may compute and allocate.

Templates come with models, so they may be hostile. Jinja's sandbox keeps them away from Python's internals; this one
also bounds time and memory. Loops and calls are counted. The size of a result is bounded before it is computed wherever
an operator, a filter or a method could multiply sizes, and the sizes of all results together have a limit.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial, update_wrapper
from typing import Any

import jinja2
import jinja2.nodes as nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from chairlift.errors import InvalidParameter

_OPERATORS = frozenset(["+", "-", "*", "/", "//", "%", "**"])
_MAX_PADDING = 10_000  # The limit of padding.
_CALL_STEPS = 8  # a call takes as long as several operators
_PADDING = frozenset(["center", "ljust", "rjust", "zfill", "to_bytes"])
_REFUSED_METHODS = frozenset(["translate", "maketrans"])


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment with the functions that templates expect."""

    intercepted_binops = _OPERATORS

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._finalized,
        )
        self.code_generator_class = _Generator
        self.filters = bounded_filters(self.filters, lambda: self.meter)
        self.filters |= {"_counted": self._counted, "_measured": lambda value: self.meter.measured(value)}
        self.globals["namespace"] = _PublicNamespace
        del self.globals["lipsum"]
        self._local = threading.local()

    @property
    def meter(self) -> Meter:
        """The meter of the rendering in this thread."""
        if not hasattr(self._local, "meter"):
            self._local.meter = Meter()  # constants are computed when the template is compiled
        return self._local.meter  # type: ignore[no-any-return]

    def render(self, template: jinja2.Template, context: dict[str, Any], most: int) -> str:
        """Render a template with a new meter; raises for a text of more than `most` characters."""
        self._local.meter = Meter()
        pieces, length = list[str](), 0
        for piece in template.generate(context):
            length += len(piece)
            if length > most:
                raise InvalidParameter("messages", f"the rendered conversation exceeds {most} characters; send less")
            pieces.append(piece)
        return "".join(pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then have the items of loops counted and the sizes of list, tuple and dict displays measured."""
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = _filtered("_counted", loop.iter)
        for parent in [template, *template.find_all(nodes.Node)]:
            for field, value in parent.iter_fields():
                if isinstance(value, list):
                    value[:] = map(_measured, value)
                else:
                    setattr(parent, field, _measured(value))
        return template

    # ---- what compiled templates call -------------------------------------------------------------------------

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.step()
        numbers = all(isinstance(operand, (int, float)) for operand in (left, right))
        if operator == "**" and (not numbers or abs(left) > 2**16 or abs(right) > 64):
            raise SecurityError("the operands of ** are too large")
        if operator == "*" and not numbers:
            check_product(*(len(one) if hasattr(one, "__len__") else one for one in (left, right)))
        if operator == "%" and isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,))
        return self.meter.measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self.meter.step(_CALL_STEPS)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            args = (*_checked_call(owner, __obj.__name__, args),)
        return __self.meter.measured(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            if re.search(r"\d{4}|[:!][^}]*\{|\{[^}:]*[.\[]", value.__self__):
                raise SecurityError("this format is not supported")
            check_product(value.__self__.count("{"), max(map(len, map(text_of, [*args, *kwargs.values()])), default=1))
            return wrapped(*args, **kwargs)

        return bounded

    def concatenated(self, values: Iterable[Any]) -> str:
        """Compute `a ~ b ~ c`."""
        self.meter.step()
        texts = [text_of(value) for value in values]
        check_product(1, sum(map(len, texts)))
        return str(self.meter.measured("".join(texts)))

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a macro or a block."""
        return self.concatenated(pieces)

    def _counted(self, values: Any) -> Iterator[Any]:
        """Count the items of a loop. (A property of the loop such as `length` still works: jinja makes a list then.)"""
        for value in values:
            self.meter.step()
            yield value

    def _finalized(self, value: Any) -> Any:
        """Convert what a template prints to text of bounded length."""
        return value if isinstance(value, (str, jinja2.Undefined)) else text_of(value)


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks the model's own text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration is a plain set)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PublicNamespace(Namespace):
    """A namespace without private attributes: code outside the sandbox would call `__html__`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name, value in values.items():
            _check_entry(name, value)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_entry(name, value)
        super().__setitem__(name, value)


def _check_entry(name: object, value: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold the private name {name!r}")
    if isinstance(value, Namespace):  # its size would not be known
        raise SecurityError("a namespace cannot hold another")


def _measured(value: Any) -> Any:
    """Have the size of a list, tuple or dict display measured; other parts of a template are returned unchanged."""
    is_display = isinstance(value, (nodes.List, nodes.Dict, nodes.Tuple)) and getattr(value, "ctx", "load") == "load"
    return _filtered("_measured", value) if is_display else value


def _filtered(name: str, value: Any) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _checked_call(owner: str | bytes | int, method: str, args: Sequence[Any]) -> Sequence[Any]:
    """Refuse calls of methods whose result is too large; returns the arguments, with iterators as lists."""
    if method in _REFUSED_METHODS:
        raise SecurityError(f"the method {method} is not supported")
    if method in _PADDING and any(isinstance(arg, int) and arg > _MAX_PADDING for arg in args):
        raise SecurityError(f"the argument of {method} is too large")
    if isinstance(owner, int):
        return args
    if method == "expandtabs":
        check_product(len(owner), args[0] if args else 8)
    elif method == "replace" and len(args) >= 2:
        occurrences = owner.count(args[0])
        check_product(occurrences, len(args[1]), len(owner))
    elif method == "join" and args:
        args = [list(args[0])]
        check_product(len(args[0]), len(owner), sum(map(len, args[0])))
    elif len(owner) > MAX_TEXT:
        raise SecurityError("a text is too long")
    return args


MAX_FILTER_WIDTH = 1000
_WIDENING = frozenset(["batch", "center", "indent", "round", "slice", "tojson"])  # multiply their result by an argument
# Without those for web pages, whose cost is hard to bound.
_REFUSED_FILTERS = ("filesizeformat", "forceescape", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")


Filter = Callable[..., Any]


def bounded_filters(filters: Mapping[str, Filter], meter: Callable[[], Meter]) -> dict[str, Filter]:
    """Return jinja's filters and templates' own `tojson`, with their work counted by the meter of the rendering."""
    own: dict[str, Filter] = {"tojson": to_json, "replace": _replace, "join": _join, "sum": _sum}
    own |= {"indent": _indent, "format": _format}
    chosen = {name: function for name, function in filters.items() if name not in _REFUSED_FILTERS} | own
    return {name: _metered(name, function, meter) for name, function in chosen.items()}


def _metered(name: str, function: Filter, meter: Callable[[], Meter]) -> Filter:
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter().step()
        for given in (*args[1:], *kwargs.values()) if name in _WIDENING else ():
            if isinstance(given, int) and abs(given) > MAX_FILTER_WIDTH:
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


MAX_TEXT = 8 * 2**20  # characters of one text
MAX_STEPS = 500_000  # items of loops, calls, operators and filters
MAX_VALUES = 400_000  # The limit of one list or mapping, with all that is nested in it.
MAX_BITS = 4096  # The limit of an integer.
_ALL_CHARACTERS = 2**29  # The limit of all results, most of which are short-lived.
_ALL_VALUES = 2**24  # The limit of all results, which lists keep alive.
_ATOMS = frozenset([int, float, bool, type(None)])


class Meter:
    """The limits of one rendering."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = _ALL_CHARACTERS
        self._values = _ALL_VALUES

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")

    def measured(self, value: Any) -> Any:
        """Return `value` if it and all results so far are small enough."""
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise SecurityError("a number is too large")
            return value
        if isinstance(value, (str, bytes)):
            self._characters -= len(value)
            too_much = len(value) > MAX_TEXT or self._characters < 0
        elif isinstance(value, (Sequence, Mapping, Set)) and not isinstance(value, range):
            num_values, num_characters = size_of(value)
            self._values -= num_values
            self._characters -= num_characters
            too_much = self._values < 0 or self._characters < 0
        else:
            return value
        if too_much:
            raise SecurityError("the template computes too much text or data")
        return value


def size_of(value: Any) -> tuple[int, int]:
    """Return how many values and characters the text of a value consists of; parts that occur twice count twice."""
    pending, num_values, num_characters = [value], 0, 0
    while pending:
        one = pending.pop()
        kind = type(one)
        num_values += 1
        if kind in _ATOMS:
            continue
        if kind is str or isinstance(one, (str, bytes)):
            num_characters += len(one)
        elif kind is list or kind is tuple:
            pending += one
        elif isinstance(one, Mapping):
            pending += one.keys()
            pending += one.values()
        elif isinstance(one, (Sequence, Set)) and not isinstance(one, range):
            pending += one
        elif isinstance(one, Namespace):
            raise SecurityError("a namespace cannot be part of a value")
        if num_values + len(pending) > MAX_VALUES or num_characters > MAX_TEXT:
            raise SecurityError("a value is too large")
    return num_values, num_characters


def text_of(value: Any) -> str:
    """Return `str(value)`, if it is short enough."""
    if not isinstance(value, str):
        size_of(value)
    text = str(value)
    check_product(1, len(text))
    return text


def check_product(first: Any, second: Any, more: int = 0) -> None:
    """Refuse a text or list of `first * second + more` items if that is too many; no numbers, no limit."""
    if isinstance(first, int) and isinstance(second, int) and first * second + more > MAX_TEXT:
        raise SecurityError("the result is too long")


def check_format(pattern: str, values: Sequence[Any]) -> None:
    """Refuse `pattern % values` if the result may be too long."""
    if re.search(r"%[^%a-zA-Z]*(\d{4}|\*)", pattern):
        raise SecurityError("the width of a format is too large")
    if values and isinstance(values[0], Mapping):
        values = list(values[0].values())
    check_product(pattern.count("%"), max((len(text_of(value)) for value in values), default=0) + 1000, len(pattern))
