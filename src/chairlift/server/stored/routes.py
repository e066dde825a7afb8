"""The routes of /v1/responses and /v1/conversations."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import Response
from pydantic import Field
from starlette.requests import Request

from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.server.generation.endpoint import RequestBody, max_entries
from chairlift.server.generation.handler import check_model_name
from chairlift.server.generation.reply import EventStream
from chairlift.server.http.routes import ERRORS, Service, run_input_tokens
from chairlift.server.openai.types import MAX_MESSAGES
from chairlift.server.responses.compaction import CompactionGeneration
from chairlift.server.responses.endpoint import NOT_KEPT, Keep, Keeping, ResponsesGeneration
from chairlift.server.responses.input import VALID_ID, Item, checked_items
from chairlift.server.responses.types import MAX_METADATA, CompactRequest, Metadata, ResponsesRequest
from chairlift.server.stored.background import BackgroundResponses, RunningResponse
from chairlift.server.stored.store import PUBLIC, Continued, Page, ResponseStore
from chairlift.server.wire.classes import CLASS_HEADER
from chairlift.server.wire.errors import APIError

log = logging.getLogger("chairlift.server")

DISABLED = "this server keeps no responses; start it with --responses-dir FOLDER"
CODE = "responses_disabled"
OLD = "item_reference"  # an item of the input that is another one, by its id
NOTHING = Continued()

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Annotated[Literal["asc", "desc"], Query()]
Labels = Annotated[Metadata | None, Field(max_length=MAX_METADATA), max_entries(MAX_METADATA)]
EventNumber = Annotated[int, Query(ge=-1, lt=2**31)]
Items = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]


class ConversationRequest(RequestBody):
    metadata: Labels = None
    items: Items | None = None


class ConversationUpdate(RequestBody):
    metadata: Labels


class ConversationItems(RequestBody):
    items: Annotated[Items, Field(min_length=1)]


class StoredResponses:
    """The store as requests see it; `background` is set once there is an application for it."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.background: BackgroundResponses | None = None

    @property
    def is_idle(self) -> bool:
        return self.background is None or self.background.is_idle


def owner_of(http: Request) -> str:
    key: bytes | None = http.state.key
    return PUBLIC if key is None else key.hex()


def add_response_routes(app: FastAPI, service: Service, stored: StoredResponses | None) -> None:
    """Add the routes that generate."""

    @app.post("/v1/responses", responses=ERRORS)
    async def responses(body: ResponsesRequest, http: Request) -> Response:
        """Answers a conversation, as OpenAI's Responses."""
        body.check()
        running: RunningResponse | None = getattr(http.state, "background", None)
        if _reads_stored(body):
            await _reserve(service, http, generates=not body.background or running is not None)
        continued = await _continued(body, http, stored)
        if stored is None:
            return await service.handle(ResponsesGeneration(body, service.model), http)
        if body.background and running is None:
            check_model_name(service.model, body.model)
            return await _start(stored, service, body, http, continued)
        request = ResponsesGeneration(body, service.model, _keeping(stored.store, body, http, continued, running))
        return await service.handle(request, http)

    @app.post("/v1/responses/compact", responses=ERRORS)
    async def compact(body: CompactRequest, http: Request) -> Response:
        """Replaces a conversation by a summary of it."""
        continued = NOTHING
        if _reads_stored(body):
            await _reserve(service, http, generates=True)
        if body.previous_response_id is not None:
            store = _enabled(stored, "previous_response_id")
            continued = await store.after_response(owner_of(http), body.previous_response_id)
        if isinstance(body.input, list):
            await _resolve(body.input, http, stored)
        return await service.handle(CompactionGeneration(body, continued.earlier, service.model), http)

    @app.post("/v1/responses/input_tokens", responses=ERRORS)
    async def input_tokens(body: ResponsesRequest, http: Request) -> Response:
        """The number of tokens of the input of a response."""
        check_model_name(service.model, body.model)
        if _reads_stored(body):
            await _reserve(service, http, generates=False)
        await _continued(body, http, stored)
        return await run_input_tokens(service, http, ResponsesGeneration(body, service.model))


def _reads_stored(body: ResponsesRequest | CompactRequest) -> bool:
    given = isinstance(body, ResponsesRequest) and body.conversation_id is not None
    names_items = isinstance(body.input, list) and any(item.get("type") == OLD for item in body.input)
    return given or names_items or body.previous_response_id is not None


async def _reserve(service: Service, http: Request, *, generates: bool) -> None:
    """Reserve room before stored items are read, as for a large body: a refused request must cost no work."""
    held, tenant = http.state.parsing, http.state.tenant or ""
    await held.aclose()
    if generates:
        await held.enter_async_context(service.admission.reserve(1, 1, tenant))
    else:
        held.enter_context(service.admission.reserve_text_job(tenant))


async def _continued(body: ResponsesRequest, http: Request, stored: StoredResponses | None) -> Continued:
    """Find what a request continues, and put it before its input."""
    if isinstance(body.input, list):
        await _resolve(body.input, http, stored)
    continued = NOTHING
    if body.previous_response_id is not None:
        store = _enabled(stored, "previous_response_id")
        continued = await store.after_response(owner_of(http), body.previous_response_id)
    elif body.conversation_id is not None:
        continued = await _enabled(stored, "conversation").after_conversation(owner_of(http), body.conversation_id)
    elif body.background:
        _enabled(stored, "background")
    body.continue_from(continued.earlier)
    return continued


async def _resolve(items: list[Item], http: Request, stored: StoredResponses | None) -> None:
    """Replace the items that name stored ones by these."""
    named = {index: item.get("id") for index, item in enumerate(items) if item.get("type") == OLD}
    if stored is None or not named:
        return  # Without a store they are refused where the input is read.
    ids = [item_id for item_id in named.values() if isinstance(item_id, str) and VALID_ID.fullmatch(item_id)]
    found = await stored.store.items_by_id(owner_of(http), ids)
    for index, item_id in named.items():
        if item_id not in ids or item_id not in found:
            raise InvalidParameter(f"input[{index}].id", "there is no such item", "item_not_found")
        items[index] = found[item_id]


def _enabled(stored: StoredResponses | None, parameter: str) -> ResponseStore:
    if stored is None:
        raise InvalidParameter(parameter, f"{DISABLED}, or send all earlier items in input", CODE)
    return stored.store


def _keeping(
    store: ResponseStore, body: ResponsesRequest, http: Request, continued: Continued, running: RunningResponse | None
) -> Keeping:
    """Return how the response to a request is kept."""
    if running is not None:
        background = running

        async def finish(response: dict[str, Any], items: list[Item]) -> bool:
            await store.finish(background.run, response, background.items, continued)
            background.is_kept = True
            return True

        return Keeping(finish, store=True, background=True, response_id=running.run.id, created_at=running.created_at)
    # The lines of a batch are stored only if they ask for it: they would displace everything else.
    stores = body.store is not False if "client" in http.scope else bool(body.store)
    if not stores and continued.conversation is None:
        return NOT_KEPT
    return Keeping(_keep(store, owner_of(http), continued, stores=stores, must=body.store is True), store=stores)


def _keep(store: ResponseStore, owner: str, continued: Continued, *, stores: bool, must: bool) -> Keep:
    """Return what keeps a response. If only the default asks for it, the response is answered even where it cannot be
    stored."""

    async def keep(response: dict[str, Any], items: list[Item]) -> bool:
        try:
            await store.keep(owner, response, items, continued, store=stores)
        except ChairliftError as error:
            if must or continued is not NOTHING:
                raise
            log.error("a response is not stored: %s", error)
            return False
        return stores

    return keep


async def _start(
    stored: StoredResponses, service: Service, body: ResponsesRequest, http: Request, continued: Continued
) -> Response:
    """Answer a request before its response is generated."""
    background = stored.background
    if background is None or "client" not in http.scope:
        raise InvalidParameter("background", "a line of a batch cannot run in the background")
    data, run, created_at = await http.body(), background.new_run(owner_of(http)), int(time.time())
    keeping = Keeping(None, store=True, background=True, response_id=run.id, created_at=created_at)
    request = ResponsesGeneration(body, service.model, keeping)
    await http.state.parsing.aclose()
    try:
        await service.tokenizer_pool.run_text_job(http.state.tenant or "", len(data), request.read_input)
    except InvalidParameter as error:
        raise request.rename_error(error) from None
    response = request.queued()
    state = {"key": http.state.key, "tenant": http.state.tenant, "class": http.headers.get(CLASS_HEADER)}
    running = RunningResponse(run, data, state, request.kept_items, created_at, streams=bool(body.stream))
    await asyncio.shield(background.start(running, response, continued))  # The client may leave meanwhile.
    if body.stream:
        return EventStream(background.stream(run.owner, run.id, 0), on_end=lambda: None)
    return _json(response)


# ---- what is stored --------------------------------------------------------------------------------------------------


def add_stored_routes(app: FastAPI, stored: StoredResponses | None) -> None:
    """Add the routes for what is stored."""

    def store_of() -> ResponseStore:
        if stored is None:
            raise APIError(404, DISABLED, code=CODE)
        return stored.store

    @app.get("/v1/responses/{response_id}", responses=ERRORS)
    async def retrieve(
        response_id: str,
        http: Request,
        stream: bool = False,
        starting_after: EventNumber = -1,
    ) -> Response:
        """A stored response, or with stream the events of one that was generated in the background."""
        response = await store_of().response(owner_of(http), response_id)
        if not stream:
            return _json(response)
        assert stored is not None
        assert stored.background is not None
        pieces, may_follow = await store_of().events(owner_of(http), response_id, 0)
        if not response["background"] or not (pieces or may_follow):
            problem = "only responses that were created with background and stream can be streamed again"
            raise InvalidParameter("stream", problem)
        events = stored.background.stream(owner_of(http), response_id, starting_after + 1)
        return EventStream(events, on_end=lambda: None)

    @app.delete("/v1/responses/{response_id}", responses=ERRORS)
    async def delete(response_id: str, http: Request) -> dict[str, Any]:
        """Deletes a stored response."""
        await store_of().delete(owner_of(http), "response", response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel", responses=ERRORS)
    async def cancel(response_id: str, http: Request) -> Response:
        """Ends a response that is generated in the background."""
        return _json(await store_of().cancel(owner_of(http), response_id))

    @app.get("/v1/responses/{response_id}/input_items", responses=ERRORS)
    async def input_items(
        response_id: str, http: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
    ) -> Response:
        """The input of a stored response."""
        page = Page(limit, order, after)
        return _json(await store_of().list_items(owner_of(http), "response", response_id, page))

    @app.post("/v1/conversations", responses=ERRORS)
    async def create_conversation(body: ConversationRequest, http: Request) -> dict[str, Any]:
        """Creates a conversation, to which responses add their items."""
        store = store_of()
        items = await asyncio.to_thread(_checked, body.items or [])
        return await store.create_conversation(owner_of(http), body.metadata or {}, items)

    @app.get("/v1/conversations/{conversation_id}", responses=ERRORS)
    async def retrieve_conversation(conversation_id: str, http: Request) -> dict[str, Any]:
        """A conversation, without its items."""
        return await store_of().conversation(owner_of(http), conversation_id)

    @app.post("/v1/conversations/{conversation_id}", responses=ERRORS)
    async def update_conversation(conversation_id: str, body: ConversationUpdate, http: Request) -> dict[str, Any]:
        """Replaces the labels of a conversation."""
        return await store_of().update_conversation(owner_of(http), conversation_id, body.metadata or {})

    @app.delete("/v1/conversations/{conversation_id}", responses=ERRORS)
    async def delete_conversation(conversation_id: str, http: Request) -> dict[str, Any]:
        """Deletes a conversation with its items."""
        await store_of().delete(owner_of(http), "conversation", conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @app.get("/v1/conversations/{conversation_id}/items", responses=ERRORS)
    async def items(
        conversation_id: str, http: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
    ) -> Response:
        """The items of a conversation."""
        page = Page(limit, order, after)
        return _json(await store_of().list_items(owner_of(http), "conversation", conversation_id, page))

    @app.post("/v1/conversations/{conversation_id}/items", responses=ERRORS)
    async def add_items(conversation_id: str, body: ConversationItems, http: Request) -> Response:
        """Adds items to a conversation."""
        store = store_of()
        new = await asyncio.to_thread(_checked, body.items)
        return _json(await store.add_to_conversation(owner_of(http), conversation_id, new))

    @app.get("/v1/conversations/{conversation_id}/items/{item_id}", responses=ERRORS)
    async def item(conversation_id: str, item_id: str, http: Request) -> Response:
        """An item of a conversation."""
        return _json(await store_of().conversation_item(owner_of(http), conversation_id, item_id))

    @app.delete("/v1/conversations/{conversation_id}/items/{item_id}", responses=ERRORS)
    async def delete_item(conversation_id: str, item_id: str, http: Request) -> dict[str, Any]:
        """Removes an item from a conversation."""
        return await store_of().remove_from_conversation(owner_of(http), conversation_id, item_id)


def _json(content: Any) -> Response:
    """Return a response of stored objects, most of which are JSON already."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def _checked(items: list[Item]) -> list[Item]:
    try:
        return checked_items(items)
    except InvalidParameter as error:
        raise error.renamed(error.parameter.replace("input", "items", 1)) from None
