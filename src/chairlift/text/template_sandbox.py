"""The sandbox of chat templates, with limits on what a rendering may compute and allocate.

Templates come with models, so they may be hostile. Jinja's sandbox keeps them away from Python's internals; this one
also bounds time and memory. Loops and calls are counted. The size of a result is bounded before it is computed wherever
an operator, a filter or a method could multiply sizes, and the sizes of all results together have a limit.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
import jinja2.nodes as nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from chairlift.text import template_filters
from chairlift.text.template_meter import MAX_TEXT, Meter, check_format, check_product, text_of

_OPERATORS = frozenset(["+", "-", "*", "/", "//", "%", "**"])
_MAX_WIDTH = 10_000  # The limit of padding.
_CALL_STEPS = 8  # a call takes as long as several operators
_WIDTHS = frozenset(["center", "ljust", "rjust", "zfill", "to_bytes"])
_REFUSED_METHODS = frozenset(["translate", "maketrans"])


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """An environment with the functions that templates expect; use `metered` around each rendering."""

    intercepted_binops = _OPERATORS

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._finalized,
        )
        self.code_generator_class = _Generator
        self.filters = template_filters.bounded(self.filters, lambda: self.meter)
        self.filters |= {"_counted": self._counted, "_measured": lambda value: self.meter.measured(value)}
        self.globals["namespace"] = _PublicNamespace
        del self.globals["lipsum"]
        self._local = threading.local()

    @property
    def meter(self) -> Meter:
        """The meter of the rendering in this thread."""
        if not hasattr(self._local, "meter"):
            self.begin()  # constants are computed when the template is compiled
        return self._local.meter  # type: ignore[no-any-return]

    def begin(self) -> None:
        """Start to count for a new rendering."""
        self._local.meter = Meter()

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
    if method in _WIDTHS and any(isinstance(arg, int) and arg > _MAX_WIDTH for arg in args):
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
