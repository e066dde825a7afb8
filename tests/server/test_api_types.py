"""Bodies with thousands of errors."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from chairlift.server.openai.types import ChatRequest, CompletionRequest, TokenizeRequest
from chairlift.server.pooling.types import EmbeddingRequest, RerankRequest, ScoreRequest
from chairlift.server.responses.types import ResponsesRequest

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
