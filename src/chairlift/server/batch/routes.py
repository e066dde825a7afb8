"""The routes /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import Field
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.types import Message, Receive

from chairlift.errors import InvalidParameter
from chairlift.server.batch.file_store import OUTPUT_SECONDS, PURPOSES, STEP, StoredFile, Upload, locked
from chairlift.server.batch.folder import BatchRecord, BatchStatus, FilesFolder, OwnerFolder
from chairlift.server.batch.input import PATHS
from chairlift.server.generation.endpoint import RequestBody, StrictModel
from chairlift.server.wire.errors import APIError, too_busy

MAX_FILENAME = 255
MAX_OPEN_BATCHES = 100  # One owner's.
MAX_BATCHES = 5_000  # One owner's, finished ones too.
MIN_LIFETIME, MAX_LIFETIME = 3600, 30 * 86_400  # seconds
FORM_BYTES = 2**16  # An upload's, beside its file.
WINDOW_SECONDS = 24 * 3600
FORM_FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")

Entry = TypeVar("Entry", StoredFile, BatchRecord)
Limit = Annotated[int, Query(ge=1, le=10_000)]


class OutputExpiry(StrictModel):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFETIME, le=MAX_LIFETIME)]


class BatchRequest(RequestBody):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, Field(max_length=16)
    ] = None
    output_expires_after: OutputExpiry | None = None


def owner_in(folder: FilesFolder | None) -> Callable[[Request], OwnerFolder]:
    """Return what finds the folder of a request's key; it raises if the server keeps no files."""

    def owner_of(http: Request) -> OwnerFolder:
        if folder is None:
            raise APIError(404, "this server keeps no files; start it with --files-dir FOLDER", code="files_disabled")
        return folder.owner(http.state.key)

    return owner_of


def add_file_routes(app: FastAPI, folder: FilesFolder | None, errors: dict[int | str, dict[str, Any]]) -> None:
    owner_of = owner_in(folder)

    @app.post("/v1/files", responses=errors)
    async def upload(http: Request) -> JSONResponse:
        store, length = owner_of(http).files, int(http.headers.get("content-length", 0))
        _check_form(http.headers.get("content-type", ""))
        upload = await asyncio.to_thread(Upload, store, length - FORM_BYTES)
        try:
            reserved = Request(http.scope, _reserving(http.receive, upload))
            async with reserved.form(max_files=1, max_fields=len(FORM_FIELDS)) as form:
                return JSONResponse((await asyncio.to_thread(_store, upload, dict(form))).body())
        finally:
            upload.close()

    @app.get("/v1/files", responses=errors)
    async def files(
        http: Request,
        purpose: str | None = None,
        limit: Limit = 10_000,
        after: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        store = owner_of(http).files

        def page() -> bytes:
            chosen = [file for file in store.all() if purpose is None or file.purpose == purpose]
            return _page(chosen if order == "desc" else chosen[::-1], limit, after)

        return Response(await asyncio.to_thread(page), media_type="application/json")

    @app.get("/v1/files/{file_id}", responses=errors)
    async def file(file_id: str, http: Request) -> dict[str, Any]:
        return _found(owner_of(http).files.find(file_id), "file").body()

    @app.get("/v1/files/{file_id}/content", responses=errors)
    async def content(file_id: str, http: Request) -> Response:
        store = owner_of(http).files
        found = _found(store.find(file_id), "file")
        return FileResponse(store.content(found.id), media_type="application/octet-stream", filename=found.filename)

    @app.delete("/v1/files/{file_id}", responses=errors)
    async def delete(file_id: str, http: Request) -> dict[str, Any]:
        store = owner_of(http).files
        await asyncio.to_thread(store.delete, _found(store.find(file_id), "file").id)
        return {"id": file_id, "object": "file", "deleted": True}

    @app.post("/v1/batches", responses=errors)
    async def create(body: BatchRequest, http: Request) -> dict[str, Any]:
        owner = owner_of(http)
        if body.endpoint not in PATHS:
            raise InvalidParameter("endpoint", f"must be one of {', '.join(PATHS)}, got {body.endpoint[:100]!r}")
        source = owner.files.find(body.input_file_id)
        if source is None or source.purpose != "batch":
            raise InvalidParameter("input_file_id", "is not a file that was uploaded with purpose 'batch'")
        now = int(time.time())
        batch = BatchRecord(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=source.id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=body.metadata,
            output_seconds=OUTPUT_SECONDS if body.output_expires_after is None else body.output_expires_after.seconds,
            key=http.state.key,
            tenant=http.state.tenant,
        )
        await asyncio.to_thread(add_batch, owner, batch)
        return batch.body()

    @app.get("/v1/batches", responses=errors)
    async def batches(http: Request, limit: Limit = 20, after: str | None = None) -> Response:
        owner = owner_of(http)

        def page() -> bytes:
            own = (batch for batch in owner.all_batches() if batch.endpoint in PATHS)  # Others are Anthropic's.
            found = sorted(own, key=lambda batch: (batch.created_at, batch.id), reverse=True)
            return _page(found, limit, after)

        return Response(await asyncio.to_thread(page), media_type="application/json")

    @app.get("/v1/batches/{batch_id}", responses=errors)
    async def batch(batch_id: str, http: Request) -> dict[str, Any]:
        return _found_batch(owner_of(http), batch_id).body()

    @app.post("/v1/batches/{batch_id}/cancel", responses=errors)
    async def cancel(batch_id: str, http: Request) -> dict[str, Any]:
        owner = owner_of(http)
        found = _found_batch(owner, batch_id)
        if found.status.is_final:
            raise APIError(409, f"the batch is {found.status.value} already", param="batch_id", code="invalid_state")
        if found.status is not BatchStatus.CANCELLING:
            owner.cancel(found.id)
        return _found_batch(owner, batch_id).body()


def add_batch(owner: OwnerFolder, batch: BatchRecord) -> None:
    with locked(owner.batches.folder):
        others = list(owner.batches.all())
        finished = sorted((other for other in others if other.status.is_final), key=lambda other: other.created_at)
        if len(others) - len(finished) >= MAX_OPEN_BATCHES:
            raise too_busy(f"{MAX_OPEN_BATCHES} batches are not finished yet; wait for one of them")
        for oldest in finished[: max(0, len(others) + 1 - MAX_BATCHES)]:
            owner.remove_batch(oldest.id)
        owner.batches.save(batch.id, batch)


def _check_form(content_type: str) -> None:
    """Refuse what would be read in memory, and charsets, which may name any of Python's codecs: punycode takes a
    quarter of a minute for a field of 1 MiB."""
    kind, options = parse_options_header(content_type)
    if kind == b"application/x-www-form-urlencoded":
        raise InvalidParameter("file", "must be a file, in multipart/form-data")
    if options.get(b"charset", b"utf-8").lower() != b"utf-8":
        raise APIError(415, "a form must be in UTF-8", code="unsupported_media_type")


def _reserving(receive: Receive, upload: Upload) -> Receive:
    """Reserve room for a form before it is written anywhere, also if its length is not known."""
    arrived = 0

    async def receive_within_quota() -> Message:
        nonlocal arrived
        message = await receive()
        arrived += len(message.get("body", b""))
        if arrived - FORM_BYTES > upload.size:
            await asyncio.to_thread(upload.reserve, arrived - FORM_BYTES, STEP)
        return message

    return receive_within_quota


def _store(upload: Upload, form: dict[str, Any]) -> StoredFile:
    if unknown := sorted(set(form) - set(FORM_FIELDS)):
        raise InvalidParameter(unknown[0][:100], "unknown parameter", "unknown_parameter")
    purpose, file = form.get("purpose"), form.get("file")
    if purpose not in PURPOSES:
        raise InvalidParameter("purpose", f"must be {' or '.join(PURPOSES)}, got {str(purpose)[:40]!r}")
    if not isinstance(file, UploadFile):
        raise InvalidParameter("file", "must be a file")
    name = (file.filename or "file").replace("\\", "/").rsplit("/", 1)[-1][:MAX_FILENAME]
    return upload.finish(file.file, name, purpose, _expiry(form))


def _expiry(form: dict[str, Any]) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidParameter("expires_after.anchor", "must be created_at")
    digits = str(seconds)
    if not digits.isdecimal() or len(digits) > 10 or not MIN_LIFETIME <= int(digits) <= MAX_LIFETIME:
        raise InvalidParameter("expires_after.seconds", f"must be from {MIN_LIFETIME} to {MAX_LIFETIME}")
    return int(time.time()) + int(digits)


def _found(entry: Entry | None, kind: str) -> Entry:
    if entry is None:
        raise APIError(404, f"there is no such {kind}", param=f"{kind}_id", code="not_found")
    return entry


def _found_batch(owner: OwnerFolder, batch_id: str) -> BatchRecord:
    batch = owner.find_batch(batch_id)
    return _found(batch if batch is not None and batch.endpoint in PATHS else None, "batch")


def _page(entries: Sequence[Entry], limit: int, after: str | None) -> bytes:
    """Return a part of a list as JSON."""
    ids = [entry.id for entry in entries]
    begin = ids.index(after) + 1 if after in ids else 0
    if after is not None and not begin:
        raise InvalidParameter("after", "is not an id of this list")
    page = entries[begin : begin + limit]
    body = {
        "object": "list",
        "data": [entry.body() for entry in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": begin + limit < len(entries),
    }
    return msgspec.json.encode(body)
