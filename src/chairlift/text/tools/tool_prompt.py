"""Tools for chat templates without tool support: descriptions in the prompt, and calls as plain messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from chairlift.text.tool_formats.base import Message, ToolFormat
from chairlift.text.tools.tool import Tool


def describe(tools: Sequence[Tool], format_: ToolFormat) -> str:
    """Return the instructions for calling these tools."""
    lines = "\n".join(json.dumps(tool.given, ensure_ascii=False) for tool in tools)
    example = format_.write([("function_name", '{"parameter": "value"}')])
    return (
        "You can call functions to help with the request. They are described here as JSON, one per line:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        f"To call a function, answer in exactly this form, with its name and its arguments:\n{example}\n\n"
        "The results come back between <tool_response> tags. If no function helps, answer in words."
    )


def in_system_message(messages: list[Message], description: str) -> list[Message]:
    """Append the description to the system message, which is added if there is none."""
    if messages[0]["role"] in ("system", "developer"):
        return [_with_content(messages[0], f"{messages[0]['content']}\n\n{description}"), *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def in_user_message(messages: list[Message], description: str) -> list[Message]:
    """Prepend the description to the first user message: for templates that refuse system messages."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": description}, *messages]
    user = _with_content(messages[first], f"{description}\n\n{messages[first]['content']}")
    return [*messages[:first], user, *messages[first + 1 :]]


def as_plain_messages(messages: list[Message], format_: ToolFormat) -> list[Message]:
    """Turn calls into the text that the model generated, and results into user messages."""
    plain: list[Message] = []
    for are_results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_results:  # merged into one message: templates require alternating roles
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            plain.append({"role": "user", "content": "\n".join(results)})
        else:
            plain += [_with_calls_as_text(message, format_) for message in group]
    return plain


def _with_calls_as_text(message: Message, format_: ToolFormat) -> Message:
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(each["name"], json.dumps(each.get("arguments") or {}, ensure_ascii=False)) for each in functions]
    text = format_.write(calls)
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {key: item for key, item in message.items() if key != "tool_calls"} | {"content": content}


def _with_content(message: Message, content: str) -> Message:
    return {**message, "content": content}
