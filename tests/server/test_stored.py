"""Stored responses and conversations with the real OpenAI client: chains, items, paging, tenants, quota and expiry."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.conversations import ConversationItem
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from chairlift.errors import InvalidParameter
from chairlift.server.stored import database
from chairlift.server.stored import store as stored
from chairlift.server.stored.store import ResponseStore
from chairlift.server.wire.limits import Limits
from tests.server import openai_document
from tests.server.front_end import NAME as SCRIPTED
from tests.server.front_end import FrontEnd, front_end, stay_silent
from tests.server.running_server import HTTP, NAME, RunningServer, wait_for
from tests.server.test_responses import GREEDY, QUESTION

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
CONVERSATION_ITEM: TypeAdapter[Any] = TypeAdapter(ConversationItem)
MISSING = openai.NotFoundError


@pytest.fixture
def store(tmp_path: Path) -> ResponseStore:
    return ResponseStore(tmp_path / "stored", 10**7, 1000.0)


@pytest.fixture
def front(store: ResponseStore) -> Iterator[FrontEnd]:
    with front_end(responses=store) as running:
        yield running


def client_of(front: FrontEnd, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(client: openai.OpenAI, text: str = "hello", **more: Any) -> Response:
    return client.responses.create(model=SCRIPTED, input=text, max_output_tokens=2, **more)


def refusal(status: int, front: FrontEnd, method: str, path: str, **body: Any) -> dict[str, Any]:
    reply = HTTP.request(method, front.url + path, json=body or None)
    assert reply.status_code == status, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# ---- responses -------------------------------------------------------------------------------------------------------


def test_a_response_is_stored_as_it_was_answered(front: FrontEnd) -> None:
    client = client_of(front)
    answer = ask(client, metadata={"trip": "7"}, instructions="be brief")
    assert answer.store is True
    found = client.responses.retrieve(answer.id)
    assert found.to_dict() == answer.to_dict()
    openai_document.check_response(found.to_dict())
    streamed = list(ask(client, stream=True))[-1].response
    assert client.responses.retrieve(streamed.id).to_dict() == streamed.to_dict()
    client.responses.delete(answer.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(MISSING):
            gone(answer.id)


def test_a_response_that_is_not_to_be_stored_is_not(front: FrontEnd) -> None:
    client = client_of(front)
    answer = ask(client, store=False)
    assert answer.store is False
    with pytest.raises(MISSING):
        client.responses.retrieve(answer.id)


def test_input_items_have_ids_and_pages(front: FrontEnd) -> None:
    client = client_of(front)
    items: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "snow"},
        {"type": "message", "id": "fc_1", "role": "assistant", "content": "It snows."},
        {"role": "user", "content": "thanks"},
    ]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    answer = client.responses.create(model=SCRIPTED, input=items, tools=[tool], tool_choice="none", max_output_tokens=2)  # type: ignore[call-overload]
    found = client.responses.input_items.list(answer.id, order="asc", limit=100).data
    assert [item.type for item in found] == [
        "message",
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "message",
        "message",
    ]
    assert (found[2].id, found[3].id) == ("rs_1", "fc_1")
    assert len({item.id for item in found}) == len(items), "an id that is there already is replaced"
    for item in found:
        ITEM.validate_python(item.to_dict())
    pages = [item.id for item in client.responses.input_items.list(answer.id, limit=2)]
    assert pages == [item.id for item in reversed(found)], "all pages, the last item first"
    after = client.responses.input_items.list(answer.id, order="asc", after=found[4].id)
    assert [item.id for item in after.data] == [item.id for item in found[5:]]
    assert refusal(400, front, "GET", f"/v1/responses/{answer.id}/input_items?after=x")["param"] == "after"
    assert refusal(400, front, "GET", f"/v1/responses/{answer.id}/input_items?limit=101")["param"] == "limit"


def test_a_chain_has_the_tokens_of_all_items_sent_again(stored_server: RunningServer) -> None:
    client = stored_server.client()
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(input=items, max_output_tokens=6, instructions="be brief", **GREEDY)
    items += [item.to_dict() for item in first.output] + [{"role": "user", "content": "and then?"}]
    second = client.responses.create(input="and then?", previous_response_id=first.id, max_output_tokens=6, **GREEDY)
    call: list[Any] = [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"where": "up"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "snow"},
    ]
    items += [item.to_dict() for item in second.output] + call
    more: dict[str, Any] = {"max_output_tokens": 6, "tools": [tool], "tool_choice": "none", **GREEDY}
    third = client.responses.create(input=call, previous_response_id=second.id, **more)
    again = client.responses.create(input=items, store=False, **more)
    assert third.usage is not None
    assert again.usage is not None
    assert third.usage.input_tokens == again.usage.input_tokens
    assert third.output_text == again.output_text
    # All but the last block of the prompt were computed for the response before.
    assert again.usage.input_tokens_details.cached_tokens >= third.usage.input_tokens - 16
    assert (second.instructions, second.previous_response_id) == (None, first.id)
    count = client.responses.input_tokens.count(model=NAME, input="more", previous_response_id=third.id)
    assert count.input_tokens > third.usage.input_tokens


def test_a_response_that_lost_what_it_continues_says_so(front: FrontEnd) -> None:
    client = client_of(front)
    first = ask(client)
    second = ask(client, previous_response_id=first.id)
    client.responses.delete(first.id)
    assert client.responses.retrieve(second.id).id == second.id
    error = refusal(400, front, "POST", "/v1/responses", input="more", previous_response_id=second.id)
    assert error["code"] == "previous_response_not_found"
    assert first.id in error["message"]


def test_items_may_be_named_by_their_ids(front: FrontEnd) -> None:
    client = client_of(front)
    first = ask(client)
    message = {"role": "user", "content": "hello"}
    whole = ask(client, [message, first.output[0].to_dict(), message])  # type: ignore[arg-type]
    named = ask(client, [message, {"type": "item_reference", "id": first.output[0].id}, message])  # type: ignore[arg-type]
    assert whole.usage == named.usage
    items = [{"type": "item_reference", "id": "msg_none"}]
    assert refusal(400, front, "POST", "/v1/responses", input=items)["param"] == "input[0].id"


def test_named_items_are_limited_as_an_input_is(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_EARLIER_BYTES", 6000)
    client = client_of(front)
    client.conversations.create(items=[{"id": "msg_1", "role": "user", "content": "x" * 4000}])
    named = {"type": "item_reference", "id": "msg_1"}
    error = refusal(400, front, "POST", "/v1/responses", input=[named, named])
    assert (error["param"], error["code"]) == ("input", "conversation_too_long")
    assert "256" in refusal(400, front, "POST", "/v1/responses", input=[named])["message"], "the model's limit"


def test_what_a_refused_request_names_is_not_read(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with front_end(stay_silent, limits=Limits(max_waiting=0), responses=store) as front:  # 8 slots
        for _ in range(8):
            client_of(front).responses.create(model=SCRIPTED, input="hello", background=True)
        wait_for(lambda: len(front.engine.received) == 8, "the slots to be taken")
        read: list[str] = []
        for name in ("after_response", "after_conversation", "items_by_id"):
            monkeypatch.setattr(store, name, lambda *_, name=name: read.append(name))
        item = {"type": "item_reference", "id": "msg_1"}
        for more in ({"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"input": [item]}):
            refusal(429, front, "POST", "/v1/responses", **{"input": "hello", **more})
        refusal(429, front, "POST", "/v1/responses/compact", previous_response_id="resp_1")
        assert read == []


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation_from_its_creation_to_its_end(front: FrontEnd) -> None:
    client = client_of(front)
    conversation = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "hello"}])
    assert conversation.id.startswith("conv_")
    client.conversations.update(conversation.id, metadata={"c": "d"})
    assert client.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    answer = ask(client, "and now?", conversation=conversation.id)
    assert answer.conversation is not None
    assert answer.conversation.id == conversation.id
    ask(client, "again", conversation={"id": conversation.id}, store=False)
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=1))
    assert [(item.role, item.content[0].text) for item in items] == [  # type: ignore[union-attr]
        *(("user", "hello"), ("user", "and now?"), ("assistant", "ok"), ("user", "again"), ("assistant", "ok")),
    ]
    for item in items:
        CONVERSATION_ITEM.validate_python(item.to_dict())
    added = client.conversations.items.create(conversation.id, items=[items[0].to_dict()]).data  # type: ignore[list-item]
    assert added[0].id != items[0].id
    assert client.conversations.items.retrieve(added[0].id, conversation_id=conversation.id) == added[0]
    client.conversations.items.delete(added[0].id, conversation_id=conversation.id)
    with pytest.raises(MISSING):
        client.conversations.items.retrieve(added[0].id, conversation_id=conversation.id)
    error = refusal(400, front, "POST", "/v1/responses", input="x", previous_response_id=answer.id)
    assert conversation.id in error["message"]
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(MISSING):
        client.conversations.retrieve(conversation.id)
    with pytest.raises(MISSING):
        ask(client, conversation=conversation.id)
    assert client.responses.retrieve(answer.id).id == answer.id


def test_pages_of_large_items_are_shorter(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_EARLIER_BYTES", 6000)
    client = client_of(front)
    items: list[Any] = [
        {"role": "user", "content": letter * size} for letter, size in (("a", 7000), ("b", 9), ("c", 9))
    ]
    conversation = client.conversations.create(items=items)
    path = f"{front.url}/v1/conversations/{conversation.id}/items?order=asc&limit=100"
    first = HTTP.get(path).json()
    assert (len(first["data"]), first["has_more"]) == (1, True)
    rest = HTTP.get(f"{path}&after={first['last_id']}").json()
    assert (len(rest["data"]), rest["has_more"]) == (2, False)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"type": "letter"}], "items[0].type"),
        ([{"role": "user", "content": None}], "items[0].content"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}],
            "items[0].content[0].image_url",
        ),
        ([{"type": "compaction", "encrypted_content": "x"}], "items[0].encrypted_content"),
        ([3], "items[0]"),
        ("hello", "items"),
    ],
)
def test_items_that_no_request_can_use_are_refused(front: FrontEnd, items: Any, param: str) -> None:
    assert refusal(400, front, "POST", "/v1/conversations", items=items)["param"] == param


# ---- compaction ------------------------------------------------------------------------------------------------------


def test_a_compacted_conversation_is_read_back(front: FrontEnd) -> None:
    client = client_of(front)
    items: list[Any] = [
        *({"role": "user", "content": f"question {index}"} for index in range(3)),
        {"role": "assistant", "content": "a long answer"},
    ]
    compacted = client.responses.compact(model=SCRIPTED, input=items)
    assert compacted.object == "response.compaction"
    *kept, item = compacted.to_dict()["output"]  # type: ignore[misc]
    assert [message["content"][0]["text"] for message in kept] == ["question 0", "question 1", "question 2"]
    assert item["type"] == "compaction"
    then = [*kept, item, {"role": "user", "content": "go on"}]
    tokens = client.responses.input_tokens.count(model=SCRIPTED, input=then).input_tokens
    same = [
        {"role": "user", "content": "question 0\n\nquestion 1\n\nquestion 2"},
        {"role": "assistant", "content": "Summary of the conversation so far:\n\nok"},
        then[-1],
    ]
    assert tokens == client.responses.input_tokens.count(model=SCRIPTED, input=same).input_tokens
    first = ask(client)
    assert client.responses.compact(model=SCRIPTED, previous_response_id=first.id).output[-1].type == "compaction"


# ---- hostile requests ------------------------------------------------------------------------------------------------

LONE = "\ud800"
CALL = {"type": "function_call", "call_id": LONE, "name": "f", "arguments": "{}"}
TOOLS = {"type": "additional_tools", "tools": [{"type": "function", "name": LONE}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "previous_response_id": LONE}, "previous_response_id"),
        ({"input": "x", "previous_response_id": "r" * 101}, "previous_response_id"),
        ({"input": "x", "instructions": LONE, "background": True}, "instructions"),
        ({"input": [{"role": "user", "content": "x"}, CALL]}, "input[1]"),
        ({"input": [{"type": "item_reference", "id": LONE}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "' OR 1=1 --"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": f"msg_{index}"} for index in range(2048)]}, "input[0].id"),
        ({"items": [CALL]}, "items[0]"),
        ({"items": [TOOLS]}, "items[0]"),
        ({"items": [{"role": "user", "content": LONE}]}, "items[0]"),
        ({"metadata": {"a": LONE}}, "metadata.a"),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_what_cannot_be_kept_is_refused_before_it_is_generated(
    front: FrontEnd, body: dict[str, Any], param: str
) -> None:
    path = "responses" if "input" in body else "conversations"
    headers = {"content-type": "application/json"}
    reply = HTTP.post(f"{front.url}/v1/{path}", content=json.dumps(body), headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert not front.engine.received


@pytest.mark.parametrize("given", ["%00", "%ff%fe", "%27%20OR%201=1--", "..%2f..%2fetc", "x" * 5000, "resp_%25"])
def test_hostile_ids_are_those_of_nothing(front: FrontEnd, given: str) -> None:
    ask(client_of(front))
    for method, path in (("GET", "responses/{}"), ("DELETE", "responses/{}"), ("POST", "responses/{}/cancel")):
        assert refusal(404, front, method, "/v1/" + path.format(given))
    for path in ("conversations/{}", "conversations/{}/items", "conversations/x/items/{}"):
        assert refusal(404, front, "GET", "/v1/" + path.format(given))


# ---- tenants, quota and expiry ---------------------------------------------------------------------------------------


def test_a_tenant_sees_nothing_of_another(store: ResponseStore) -> None:
    with front_end(responses=store, api_keys=["alice key-of-alice-123", "bob key-of-bob-123456"]) as front:
        alice, bob = (client_of(front, key) for key in ("key-of-alice-123", "key-of-bob-123456"))
        answer = ask(alice)
        conversation = alice.conversations.create(items=[{"role": "user", "content": "hello"}])
        item = alice.conversations.items.list(conversation.id).data[0]
        attempts = [
            lambda: bob.responses.retrieve(answer.id),
            lambda: bob.responses.delete(answer.id),
            lambda: bob.responses.cancel(answer.id),
            lambda: bob.responses.input_items.list(answer.id),
            lambda: bob.conversations.retrieve(conversation.id),
            lambda: bob.conversations.update(conversation.id, metadata={}),
            lambda: bob.conversations.delete(conversation.id),
            lambda: bob.conversations.items.list(conversation.id),
            lambda: bob.conversations.items.create(conversation.id, items=[{"role": "user", "content": "x"}]),
            lambda: bob.conversations.items.retrieve(item.id, conversation_id=conversation.id),
            lambda: bob.conversations.items.delete(item.id, conversation_id=conversation.id),
            lambda: ask(bob, conversation=conversation.id),
            lambda: ask(bob, previous_response_id=answer.id),
            lambda: bob.responses.compact(model=SCRIPTED, previous_response_id=answer.id),
            lambda: ask(bob, [{"type": "item_reference", "id": answer.output[0].id}]),  # type: ignore[arg-type]
        ]
        refusals = []
        for attempt in attempts:
            with pytest.raises(openai.APIStatusError) as caught:
                attempt()
            refusals.append(caught.value)
        # A hidden object is refused with the words for one that never was.
        assert [error.status_code for error in refusals] == [404] * 12 + [400] * 3
        nothing = [str(error) for error in refusals]
        with pytest.raises(openai.BadRequestError) as caught:
            ask(bob, previous_response_id="resp_none")
        assert nothing[12] == str(caught.value)
        assert len(alice.conversations.items.list(conversation.id).data) == 1
        assert alice.responses.retrieve(answer.id).id == answer.id


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, 20_000, 1000.0)
    with front_end(responses=store) as front:
        client = client_of(front)
        answers = [ask(client, "x" * 50) for _ in range(3)]
        conversation = client.conversations.create(items=[{"role": "user", "content": "x" * 5000}])
        used = _used(tmp_path)
        kept = ask(client, previous_response_id=answers[0].id)  # so the first one is used, too
        while len(answers) < 12:
            answers.append(ask(client, "y" * 50))
            assert _used(tmp_path) <= store.quota
        assert used < _used(tmp_path)
        for gone in (answers[1], answers[2]):
            with pytest.raises(MISSING):
                client.responses.retrieve(gone.id)
        with pytest.raises(MISSING):
            client.conversations.retrieve(conversation.id)
        assert client.responses.retrieve(answers[-1].id).id == answers[-1].id
        # The order is that of use: the first response outlives the second one, though all are gone in the end.
        assert kept.previous_response_id == answers[0].id
        large = [{"role": "user", "content": "z" * 20_000}]
        assert refusal(400, front, "POST", "/v1/conversations", items=large)["code"] == "quota_exceeded"


def test_sizes_are_exact(tmp_path: Path) -> None:
    with front_end(responses=ResponseStore(tmp_path, 10**6, 1000.0)) as front:
        client = client_of(front)
        conversation = client.conversations.create(items=[{"role": "user", "content": "x"}])
        client.conversations.update(conversation.id, metadata={"name": "n" * 300})
        ask(client, conversation=conversation.id)
        answer = ask(client, previous_response_id=ask(client).id)
        added = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "y"}]).data
        client.conversations.items.delete(added[0].id, conversation_id=conversation.id)
        client.responses.delete(answer.id)
        with sqlite3.connect(tmp_path / database.NAME) as connection:
            (objects,) = connection.execute("SELECT sum(256 + length(body)) FROM objects").fetchone()
            (items,) = connection.execute("SELECT sum(256 + length(body)) FROM items").fetchone()
        assert _used(tmp_path) == objects + items
        client.conversations.delete(conversation.id)


def _used(folder: Path) -> int:
    with sqlite3.connect(folder / database.NAME) as connection:
        return int(connection.execute("SELECT sum(bytes) FROM usage").fetchone()[0])


def test_what_has_expired_is_gone_at_once(front: FrontEnd, store: ResponseStore) -> None:
    client = client_of(front)
    first = ask(client)
    second = ask(client, previous_response_id=first.id)
    conversation = client.conversations.create()
    store.seconds = 0.0
    for gone in (lambda: client.responses.retrieve(first.id), lambda: client.conversations.retrieve(conversation.id)):
        with pytest.raises(MISSING):
            gone()
    error = refusal(400, front, "POST", "/v1/responses", input="x", previous_response_id=second.id)
    assert error["code"] == "previous_response_not_found"
    asyncio.run(store.remove_expired())
    with sqlite3.connect(store.folder / database.NAME) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("objects", "items", "usage")
        ]
    assert counts == [0, 0, 0]


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_the_folder_is_private_and_holds_nothing_that_was_deleted(front: FrontEnd, store: ResponseStore) -> None:
    client = client_of(front)
    secret = "the password is swordfish"
    answer = ask(client, secret)
    assert stat.S_IMODE(os.stat(store.folder).st_mode) == 0o700
    files = list(store.folder.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert any(secret.encode() in file.read_bytes() for file in files)
    client.responses.delete(answer.id)
    asyncio.run(store.tidy())
    assert not any(secret.encode() in file.read_bytes() for file in store.folder.iterdir())


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / database.NAME).write_text("no database " * 100)
    (tmp_path / "later").mkdir()
    with sqlite3.connect(tmp_path / "later" / database.NAME) as connection:
        connection.execute("PRAGMA user_version = 99")
    for name, problem in (("file", "cannot"), ("other", "not a database"), ("later", "later version")):
        with pytest.raises(InvalidParameter, match=problem) as caught:
            ResponseStore(tmp_path / name, 1000, 1.0)
        assert caught.value.parameter == "responses_dir"


def test_a_full_disk_is_said_to_those_who_need_the_store(front: FrontEnd, store: ResponseStore) -> None:
    client = client_of(front)
    first = ask(client)
    with sqlite3.connect(store.folder / database.NAME) as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    limit = f"PRAGMA max_page_count = {pages}"
    store._database._open = limited(store, limit)  # type: ignore[method-assign]
    store._database._own = type(store._database._own)()
    large = "x" * 3
    answers = [ask(client, large) for _ in range(60)]
    assert answers[0].store is True
    assert answers[-1].store is False, "it is answered all the same"
    for body in ({"store": True}, {"previous_response_id": first.id}, {"background": True}):
        error = refusal(507, front, "POST", "/v1/responses", input=large, max_output_tokens=2, **body)
        assert error["code"] == "insufficient_storage"
    client.responses.delete(answers[0].id)
    client.responses.delete(answers[1].id)
    assert ask(client, large).store is True


def limited(store: ResponseStore, statement: str) -> Any:
    opened = store._database._open

    def open_limited() -> sqlite3.Connection:
        connection = opened()
        connection.execute(statement)
        return connection

    return open_limited


def test_a_server_without_a_folder_says_how_to_get_one() -> None:
    with front_end() as front:
        for method, path in (("GET", "responses/resp_1"), ("POST", "conversations"), ("DELETE", "conversations/c")):
            error = refusal(404, front, method, f"/v1/{path}", metadata={})
            assert error["code"] == "responses_disabled"
            assert "--responses-dir" in error["message"]
