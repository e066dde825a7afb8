"""Chat templates: jinja programs that come with a model and turn a conversation into a prompt.

They are downloaded with the model, so they run in a sandbox that bounds their time and memory, and see only plain data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables

from chairlift.errors import InvalidParameter, UnsupportedModel
from chairlift.text.messages import MAX_NAME, checked_messages, plain_data
from chairlift.text.template_sandbox import TemplateSandbox

MAX_OUTPUT = 8 * 2**20  # characters of a rendered prompt
MAX_SOURCE = 2**18  # characters of a template; the longest known have about 30,000
MAX_ITERATIONS = 1_000_000  # sum over all calls of range() in one rendering


class RefusedByTemplate(InvalidParameter):
    """The template called `raise_exception` for these messages."""


class ChatTemplate:
    """A compiled template. `clock` provides the date to templates that write it."""

    def __init__(self, source: str, *, clock: Callable[[], datetime] = datetime.now) -> None:
        self._clock = clock
        if len(source) > MAX_SOURCE:
            raise UnsupportedModel(f"the model's chat template has {len(source)} characters; the limit is {MAX_SOURCE}")
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
            parsed = self._sandbox.parse(source)
            self.reads = frozenset(find_undeclared_variables(parsed))
            self.strings = frozenset(
                node.value for node in parsed.find_all(jinja2.nodes.Const) if isinstance(node.value, str)
            )
            tests = {node.name for node in parsed.find_all(jinja2.nodes.Test)}
            # It reads contents as lists of parts only, as those of some models with images do.
            self.wants_parts = "image" in self.strings and "string" not in tests
            fields = {node.attr for node in parsed.find_all(jinja2.nodes.Getattr)}
            self.names = self.strings | fields  # Messages may be read under these.
        except Exception as error:  # Compiling the generated code may raise others, too.
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
        checked: bool = False,
    ) -> str:
        """Render the prompt; raises for unknown `variables` and for tools that the template would not show.

        `checked`: the arguments are known to be plain data.
        """
        variables = variables or {}
        if not checked:
            messages, tools = checked_messages(messages), plain_data("tools", tools)
            variables = {name: plain_data(name, value) for name, value in variables.items()}
        if tools and not self.shows_tools:
            raise InvalidParameter("tools", "this model's chat template has no place for tools")
        context: dict[str, Any] = {
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        context |= {name: token for name, token in (special_tokens or {}).items() if token is not None}
        for name in variables:
            if name in context:
                raise InvalidParameter(name, "is set by the engine and cannot be a template variable")
            if name not in self.reads:
                raise InvalidParameter(name[:MAX_NAME], "is not a variable of this model's chat template")
        context |= variables

        def refuse(message: object) -> NoReturn:
            raise _Refused(str(message))

        context |= {"raise_exception": refuse, "strftime_now": self._strftime, "range": _BoundedRange()}
        try:
            return self._sandbox.render(self._template, context, MAX_OUTPUT)
        except _Refused as refusal:
            raise RefusedByTemplate("messages", f"refused by the model's chat template: {refusal}") from refusal
        except InvalidParameter:
            raise
        except Exception as error:  # the template's code may raise any exception
            raise UnsupportedModel(f"the model's chat template failed on these messages: {error}") from error

    def _strftime(self, pattern: str) -> str:
        if len(pattern) > 200 or re.search(r"\d{3}", pattern):  # C libraries pad to a width of any size
            raise SecurityError("the pattern of strftime_now is too long")
        return self._clock().strftime(pattern)


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
