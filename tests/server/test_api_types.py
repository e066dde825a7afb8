"""Bodies with thousands of errors."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from chairlift.errors import InvalidParameter
from chairlift.server.anthropic.types import MessagesRequest
from chairlift.server.generation.endpoint import StrictModel
from chairlift.server.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from chairlift.server.openai.types import ChatRequest, CompletionRequest, TokenizeRequest
from chairlift.server.responses.types import ResponsesRequest
from chairlift.text.messages import plain_data

MANY = 5000
NUMBERS, OBJECT = [1.5] * MANY, {str(index): [] for index in range(MANY)}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SAMPLING: list[dict[str, Any]] = [
    {"stop": NUMBERS},
    {"stop_token_ids": NUMBERS},
    {"logit_bias": OBJECT},
    {"guided_choice": NUMBERS},
    {"structured_outputs": {"choice": NUMBERS}},
    {"tools": NUMBERS},
    OBJECT,
]
BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    *((ChatRequest, CHAT | change) for change in [*SAMPLING, {"messages": NUMBERS}, {"response_format": OBJECT}]),
    *((ResponsesRequest, {"model": "m", "input": "x"} | change) for change in SAMPLING),
    *(
        (ResponsesRequest, {"model": "m", "input": "x"} | change)
        for change in [{"include": NUMBERS}, {"input": NUMBERS}]
    ),
    *((ResponsesRequest, {"model": "m", "input": "x"} | change) for change in [{"metadata": OBJECT}, {"text": OBJECT}]),
    *((CompletionRequest, {"model": "m", "prompt": prompt}) for prompt in [NUMBERS, ["x", *NUMBERS], [NUMBERS] * MANY]),
    *((EmbeddingRequest, {"model": "m", "input": texts}) for texts in [NUMBERS, ["x", *NUMBERS], [NUMBERS] * MANY]),
    (RerankRequest, {"model": "m", "query": "x", "documents": NUMBERS}),
    (ScoreRequest, {"model": "m", "text_1": "x", "text_2": NUMBERS}),
    *((TokenizeRequest, change) for change in [{"messages": NUMBERS}, {"tools": NUMBERS}]),
]


# No names made from the bodies: some have millions of values.
@pytest.mark.parametrize(
    ("model", "body"), BODIES, ids=[f"{number}-{model.__name__}" for number, (model, _) in enumerate(BODIES)]
)
def test_only_a_few_errors_are_reported(model: type[BaseModel], body: dict[str, Any]) -> None:
    """Formatting all errors of an 8 MiB body would take half a minute and gigabytes."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() < 10


def lists_of(annotation: Any, marks: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the lists in the type of a field, each with its limits."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        more = [one for mark in arguments[1:] for one in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
        yield from lists_of(arguments[0], marks + more)
        return
    is_list = typing.get_origin(annotation) is list
    if is_list and arguments != (Any,):
        yield annotation, marks
    for argument in arguments:
        yield from lists_of(argument, [] if is_list else marks)


def all_models(model: type[BaseModel] = StrictModel) -> Iterator[type[BaseModel]]:
    for derived in model.__subclasses__():
        yield derived
        yield from all_models(derived)


def test_every_list_reports_one_error_or_has_few_entries() -> None:
    fields = [(model, name, field) for model in all_models() for name, field in model.model_fields.items()]
    assert len(fields) > 300
    for model, name, field in fields:
        for annotation, marks in lists_of(field.annotation, field.metadata):
            limits = [getattr(mark, "fail_fast", False) or getattr(mark, "max_length", 0) for mark in marks]
            assert any(limits), (model.__name__, name, annotation)


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "name": f"f{number}"}


@pytest.mark.parametrize(
    ("tools", "choice", "parameter"),
    [
        ([tool(0)] * 3000, None, "tools"),
        ([{"type": "namespace", "name": "n", "tools": [tool(0)] * 3000}], None, "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [tool(0)] * 2000}] * 2, None, "tools"),
        ([tool(0)], [tool(0)] * 3000, "tool_choice.tools"),
    ],
)
def test_tools_are_counted_before_they_are_read(tools: list[Any], choice: list[Any] | None, parameter: str) -> None:
    """20,000 allowed ones of 20,000 tools stopped the event loop for minutes."""
    allowed = {} if choice is None else {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": choice}}
    with pytest.raises((InvalidParameter, ValidationError)) as raised:
        _ = ResponsesRequest.model_validate({"input": "x", "tools": tools, **allowed}).offered_tools
    found = raised.value
    assert (found.parameter if isinstance(found, InvalidParameter) else found.errors()[0]["loc"][0]) == parameter


def test_tools_of_messages_are_counted_before_they_are_read() -> None:
    with pytest.raises(ValidationError, match="at most 2048 items"):
        MessagesRequest.model_validate({**CHAT, "max_tokens": 1, "tools": [{"name": "f"}] * 3000})


def test_the_first_of_equal_tools_is_allowed_and_others_are_left_out() -> None:
    tools = [tool(1), tool(2), {"type": "namespace", "name": "n", "tools": [tool(3), tool(1)]}]
    for named, shown in (({}, "f1"), ({"namespace": "n"}, "n__f1"), ({"namespace": ["n"]}, None)):
        choice = {"type": "allowed_tools", "mode": "required", "tools": [tool(1) | named, tool(3)]}
        body = ResponsesRequest.model_validate({"input": "x", "tools": tools, "tool_choice": choice})
        if shown is None:
            with pytest.raises(InvalidParameter, match="'f1' is not one of the function tools"):
                _ = body.offered_tools
            continue
        chat_tools = body.offered_tools.chat_tools()
        assert chat_tools is not None
        assert {one["function"]["name"] for one in chat_tools} == {shown, "f3"}
        assert body.offered_tools.chat_choice() == "required"


def test_names_in_errors_are_short() -> None:
    """Those of the values in an object with a key of megabytes took a copy of it each."""
    with pytest.raises(InvalidParameter) as raised:
        plain_data("x", {"k" * 1000: [object()]})
    assert raised.value.parameter == f"x.{'k' * 100}[0]"
    with pytest.raises(InvalidParameter) as raised:
        plain_data("k" * 1000, [object()])
    assert raised.value.parameter == "k" * 100 + "[0]"
