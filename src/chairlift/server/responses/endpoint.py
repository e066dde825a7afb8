"""POST /v1/responses: a chat completion asked for, and answered, in the words of the newer API."""

from __future__ import annotations

import re
from functools import partial

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from chairlift.errors import InvalidParameter
from chairlift.server.openai.types import ChatRequest
from chairlift.server.responses.input import Conversation
from chairlift.server.responses.response_builder import ResponseObjectBuilder
from chairlift.server.responses.types import ResponsesRequest
from chairlift.server.service import Job, Prepared, Service
from chairlift.text.tools.tool_use import ToolUse

# What the beginning of a chat parameter's name is here.
_NAMES = {
    r"max_(completion_)?tokens": "max_output_tokens",
    r"logprobs": "top_logprobs",
    r"response_format(\.json_schema)?": "text.format",
    r"messages|prompt": "input",
    r"(tools\[\d+\]|tool_choice)\.function": r"\1",
}


async def respond(service: Service, body: ResponsesRequest, http: HTTPRequest) -> Response:
    body.check()
    try:
        chat = body.as_chat()
        params = chat.params()

        def prepare(limit: int) -> Prepared:
            use = service.tool_use(chat)
            prompt = _encode(service, body, chat, use, limit)
            wording = partial(ResponseObjectBuilder, body, service.model_name, service.tokenizer, use.parser())
            return Prepared([prompt], use.applied_to(params, service.tokenizer), wording)

        return await service.answer(chat, http, Job(params.n, 1, prepare, "input", "resp_"))
    except InvalidParameter as error:
        problem = error.problem.replace("].function", "]")  # tools are flat here
        raise InvalidParameter(_name_here(error.parameter), problem) from error


def _encode(service: Service, body: ResponsesRequest, chat: ChatRequest, use: ToolUse, limit: int) -> list[int]:
    conversation = Conversation(body.input, body.instructions)
    try:
        return service.encode_chat(chat.model_copy(update={"messages": conversation.messages}), use, limit)
    except InvalidParameter as error:
        raise InvalidParameter(conversation.place(error.parameter), error.problem) from error


def _name_here(parameter: str) -> str:
    for there, here in _NAMES.items():
        renamed, found = re.subn(rf"^(?:{there})(?![a-z_])", here, parameter)
        if found:
            return renamed
    return parameter
