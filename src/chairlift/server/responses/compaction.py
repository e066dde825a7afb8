"""POST /v1/responses/compact: replaces a conversation by the latest messages of its user and a summary of all of it."""

from __future__ import annotations

import uuid
from typing import Any

from chairlift.errors import InvalidParameter
from chairlift.server.generation.endpoint import Tokenized, parse_at
from chairlift.server.generation.usage import Usage
from chairlift.server.openai.chat import ChatPrompt
from chairlift.server.responses.endpoint import ResponseObjectBuilder, ResponsesGeneration
from chairlift.server.responses.input import COMPACTION, Earlier, Item, encoded_summary
from chairlift.server.responses.types import CompactRequest, ResponsesRequest
from chairlift.server.served_model import ServedModel
from chairlift.server.wire.errors import APIError

MAX_SUMMARY_TOKENS = 2048
SHARE = 4  # The summary, and the messages that are kept, each take at most one part of so many of the context.
REQUEST = (
    "Summarize this conversation so that it can be continued from the summary alone. Keep what the user wants, the "
    "facts, names and numbers that matter, the results of tools, the decisions and what is still to be done. Write "
    "only the summary."
)


class CompactionGeneration(ResponsesGeneration):
    def __init__(self, given: CompactRequest, earlier: Earlier, model: ServedModel) -> None:
        items: list[Item] = given.input if isinstance(given.input, list) else []
        if isinstance(given.input, str):
            items = [{"role": "user", "content": given.input}]
        if not items and not earlier.items:
            raise InvalidParameter("input", "is missing; give the conversation, or the previous_response_id of its end")
        asked = {"input": [*items, {"role": "user", "content": REQUEST}], "truncation": "auto"}
        body = parse_at("", ResponsesRequest, {"model": given.model, "instructions": given.instructions, **asked})
        body.continue_from(earlier)
        super().__init__(body, model)

    def tokenize(self, max_tokens: int) -> Tokenized:
        """Tokenize the conversation. If the context has no room for all of it, its beginning is left out."""
        self.body.max_output_tokens = limit = min(MAX_SUMMARY_TOKENS, max(1, max_tokens // SHARE))
        prompt = self._prompt(max_tokens)
        kept = latest_messages([*self.body.earlier.items, *self.messages.kept_items[:-1]], max_tokens)

        def reply(response_id: str, completion_ids: list[str], usage: Usage) -> CompactionBuilder:
            return CompactionBuilder(self, prompt, response_id, usage, kept)

        return Tokenized([prompt.tokens], prompt.params.clone(max_tokens=limit), reply, prompt.reasoning, prompt.images)


def latest_messages(items: list[Item], max_tokens: int) -> list[Item]:
    """Return the last messages of the user that fit in their part of a context, which has about four characters per
    token."""
    kept: list[Item] = []
    room = max_tokens * 4 // SHARE
    for item in reversed(items):
        if item["type"] == "message" and item["role"] == "user":
            room -= sum(len(part["text"]) for part in item["content"])
            if room < 0:
                break
            kept.insert(0, item)
    return kept


class CompactionBuilder(ResponseObjectBuilder):
    def __init__(
        self, request: CompactionGeneration, prompt: ChatPrompt, response_id: str, usage: Usage, kept: list[Item]
    ) -> None:
        super().__init__(request.body, request.params, request.model, prompt.parser(), response_id, usage)
        self._user_messages = kept

    def body(self) -> dict[str, Any]:
        response = super().body()
        parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
        summary = "".join(part["text"] for part in parts).strip()
        if not summary:
            raise APIError(500, "the model has written no summary", type_="server_error", code="no_summary")
        item = {"id": f"cmp_{uuid.uuid4().hex}", "type": COMPACTION, "encrypted_content": encoded_summary(summary)}
        return {
            "id": response["id"],
            "object": "response.compaction",
            "created_at": response["created_at"],
            "output": [*self._user_messages, item],
            "usage": response["usage"],
        }
