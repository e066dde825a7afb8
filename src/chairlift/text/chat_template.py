"""Chat templates: jinja programs that come with a model and turn a conversation into a prompt.

They are downloaded with the model, so they run in jinja's sandbox and see only plain data. The common ways to exhaust
time or memory (long ranges, repetition, powers, endless output) are bounded; a malicious template can still waste both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.text.messages import checked_messages, plain_data

MAX_OUTPUT = 8 * 2**20  # characters of a rendered prompt
MAX_ITERATIONS = 1_000_000  # sum over all calls of range() in one rendering


class RefusedByTemplate(InvalidParameter):
    """The template called `raise_exception` for these messages."""


class ChatTemplate:
    """A compiled template. `clock` provides the date to templates that write it."""

    def __init__(self, source: str, *, clock: Callable[[], datetime] = datetime.now) -> None:
        self._clock = clock
        environment = _Environment()
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            self.reads = frozenset(find_undeclared_variables(parsed))
            self.strings = frozenset(
                node.value for node in parsed.find_all(jinja2.nodes.Const) if isinstance(node.value, str)
            )
        except (jinja2.TemplateError, RecursionError) as error:
            raise UnsupportedModel(f"the model's chat template cannot be compiled: {error}") from error

    @property
    def shows_tools(self) -> bool:
        return "tools" in self.reads

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Mapping[str, str | None] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt; raises for unknown `variables` and for tools that the template would not show."""
        context: dict[str, Any] = {
            "messages": checked_messages(messages),
            "tools": self._checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        context |= {name: token for name, token in (special_tokens or {}).items() if token is not None}
        context |= self._checked_variables(variables or {}, context)
        context |= {
            "raise_exception": _refuse,
            "strftime_now": lambda pattern: self._clock().strftime(pattern),
            "range": _BoundedRange(),
        }
        return self._run(context)

    def _run(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        room = MAX_OUTPUT
        try:
            for piece in self._template.generate(context):
                room -= len(piece)
                if room < 0:
                    problem = f"the rendered conversation exceeds {MAX_OUTPUT} characters; send less"
                    raise InvalidParameter("messages", problem)
                pieces.append(piece)
        except _Refused as refusal:
            raise RefusedByTemplate("messages", f"refused by the model's chat template: {refusal}") from refusal
        except InvalidParameter:
            raise
        except Exception as error:  # the template's code may raise any exception
            raise UnsupportedModel(f"the model's chat template failed on these messages: {error}") from error
        return "".join(pieces)

    def _checked_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        if not tools:
            return None
        if not self.shows_tools:
            raise InvalidParameter("tools", "this model's chat template has no place for tools")
        return plain_data("tools", tools)

    def _checked_variables(self, variables: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
        for name in variables:
            if name in taken:
                raise InvalidParameter(name, "is set by the engine and cannot be a template variable")
            if name not in self.reads:
                raise InvalidParameter(name, "is not a variable of this model's chat template")
        return {name: plain_data(name, value) for name, value in variables.items()}


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with the functions that templates expect and limits on operators."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["namespace"] = _PublicNamespace

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        numbers = all(isinstance(operand, (int, float)) for operand in (left, right))
        if operator == "**" and (not numbers or abs(left) > 2**16 or abs(right) > 64):
            raise SecurityError("the operands of ** are too large")
        if operator == "*" and not numbers:
            _check_repetition(left, right)
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """{% generation %} … {% endgeneration %} marks the model's own text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration is a plain set)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _PublicNamespace(Namespace):
    """A namespace without private attributes: code outside the sandbox would call `__html__`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_public(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


class _BoundedRange:
    """`range` with one limit for all calls in a rendering, because nested loops multiply."""

    def __init__(self) -> None:
        self._left = MAX_ITERATIONS

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._left -= min(len(numbers), MAX_ITERATIONS + 1)
        if self._left < 0:
            raise SecurityError(f"range() is limited to {MAX_ITERATIONS} iterations in all")
        return numbers


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


def _refuse(message: object) -> NoReturn:
    raise _Refused(str(message))


def _check_public(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold the private name {name!r}")


def _check_repetition(left: Any, right: Any) -> None:
    lengths = [len(operand) for operand in (left, right) if hasattr(operand, "__len__")]
    counts = [operand for operand in (left, right) if isinstance(operand, int)]
    if lengths and counts and lengths[0] * counts[0] > MAX_OUTPUT:
        raise SecurityError("the result of * is too long")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as plain JSON: jinja's own filter escapes HTML and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
