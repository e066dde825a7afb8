"""The routes /v1/messages/batches: Anthropic's batches, as files of a server's own runner."""

from __future__ import annotations

import asyncio
import io
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, BinaryIO

import msgspec
from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field
from starlette.requests import Request

from chairlift.errors import InvalidParameter
from chairlift.server.batch.file_store import OUTPUT_SECONDS, Upload
from chairlift.server.batch.folder import BatchRecord, BatchStatus, FilesFolder, OwnerFolder
from chairlift.server.batch.input import MAX_LINE_BYTES
from chairlift.server.batch.routes import WINDOW_SECONDS, add_batch, owner_in
from chairlift.server.batch.runner import MAX_LINES
from chairlift.server.generation.endpoint import RequestBody, StrictModel
from chairlift.server.wire.errors import APIError

PATH = "/v1/messages"
PREFIX = "msgbatch_"
Limit = Annotated[int, Query(ge=1, le=1000)]


class MessageBatchLine(StrictModel):
    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchRequest(RequestBody):
    requests: Annotated[list[MessageBatchLine], Field(min_length=1, max_length=MAX_LINES, fail_fast=True)]


def add_message_batch_routes(app: FastAPI, folder: FilesFolder | None, errors: dict[int | str, dict[str, Any]]) -> None:
    owner_of = owner_in(folder)

    @app.post("/v1/messages/batches", responses=errors)
    async def create_message_batch(body: MessageBatchRequest, http: Request) -> dict[str, Any]:
        """Creates a batch of messages, which is answered while the server has room."""
        owner = owner_of(http)
        return _body(await asyncio.to_thread(_create, owner, body.requests, http.state.key, http.state.tenant))

    @app.get("/v1/messages/batches", responses=errors)
    async def list_message_batches(
        http: Request, limit: Limit = 20, after_id: str | None = None, before_id: str | None = None
    ) -> JSONResponse:
        """The batches of messages, the newest first."""
        return JSONResponse(await asyncio.to_thread(_page, owner_of(http), limit, after_id, before_id))

    @app.get("/v1/messages/batches/{message_batch_id}", responses=errors)
    async def message_batch(message_batch_id: str, http: Request) -> dict[str, Any]:
        """A batch of messages."""
        return _body(_find(owner_of(http), message_batch_id))

    @app.post("/v1/messages/batches/{message_batch_id}/cancel", responses=errors)
    async def cancel_message_batch(message_batch_id: str, http: Request) -> dict[str, Any]:
        """Cancels a batch of messages, which keeps the answers that it has."""
        owner = owner_of(http)
        batch = _find(owner, message_batch_id)
        if not batch.status.is_final and batch.status is not BatchStatus.CANCELLING:
            owner.cancel(batch.id)
        return _body(_find(owner, message_batch_id))

    @app.delete("/v1/messages/batches/{message_batch_id}", responses=errors)
    async def delete_message_batch(message_batch_id: str, http: Request) -> dict[str, Any]:
        """Deletes a batch of messages that has ended, and its results."""
        owner = owner_of(http)
        batch = _ended(owner, message_batch_id)
        await asyncio.to_thread(_delete, owner, batch)
        return {"id": batch.id, "type": "message_batch_deleted"}

    @app.get("/v1/messages/batches/{message_batch_id}/results", responses=errors)
    async def message_batch_results(message_batch_id: str, http: Request) -> Response:
        """The results of a batch of messages that has ended, one per line."""
        owner = owner_of(http)
        batch = _ended(owner, message_batch_id)
        files = await asyncio.to_thread(_open_files, owner, batch)
        return StreamingResponse(_results(batch, files), media_type="application/x-jsonl")


def _create(owner: OwnerFolder, requests: list[MessageBatchLine], key: bytes | None, tenant: str | None) -> BatchRecord:
    seen: set[str] = set()
    lines = io.BytesIO()
    for index, each in enumerate(requests):
        if each.custom_id in seen:
            raise InvalidParameter(
                f"requests[{index}].custom_id", "was given to an earlier request; each needs its own"
            )
        seen.add(each.custom_id)
        line = {"custom_id": each.custom_id, "method": "POST", "url": PATH, "body": each.params}
        try:
            lines.write(json.dumps(line).encode() + b"\n")  # Lone surrogates become escapes.
        except RecursionError:
            raise InvalidParameter(f"requests[{index}].params", "is nested too deeply") from None
        if lines.tell() > 2 * MAX_LINE_BYTES:
            raise InvalidParameter("requests", f"have more than {2 * MAX_LINE_BYTES} bytes with their escapes")
    now = int(time.time())
    batch_id, expires_at = f"{PREFIX}{uuid.uuid4().hex}", now + WINDOW_SECONDS + OUTPUT_SECONDS
    upload = Upload(owner.files, lines.tell())
    try:
        source = upload.finish(lines, f"{batch_id}.jsonl", "batch", expires_at)
    finally:
        upload.close()
    batch = BatchRecord(
        id=batch_id,
        endpoint=PATH,
        input_file_id=source.id,
        completion_window="24h",
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
        total=len(requests),
        key=key,
        tenant=tenant,
    )
    try:
        add_batch(owner, batch)
    except BaseException:
        owner.files.delete(source.id)
        raise
    return batch


def _find(owner: OwnerFolder, batch_id: str) -> BatchRecord:
    batch = owner.find_batch(batch_id)
    if batch is None or batch.endpoint != PATH:
        raise APIError(404, "there is no such batch of messages", code="not_found")
    return batch


def _ended(owner: OwnerFolder, batch_id: str) -> BatchRecord:
    batch = _find(owner, batch_id)
    if not batch.status.is_final:
        raise APIError(400, "the batch has not ended yet; wait for it, or cancel it first", code="invalid_state")
    return batch


def _delete(owner: OwnerFolder, batch: BatchRecord) -> None:
    owner.remove_batch(batch.id)
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            owner.files.delete(file_id)


def _page(owner: OwnerFolder, limit: int, after_id: str | None, before_id: str | None) -> dict[str, Any]:
    batches = [batch for batch in owner.all_batches() if batch.endpoint == PATH]
    batches.sort(key=lambda batch: (batch.created_at, batch.id), reverse=True)
    ids = [batch.id for batch in batches]
    for name, cursor in (("after_id", after_id), ("before_id", before_id)):
        if cursor is not None and cursor not in ids:
            raise InvalidParameter(name, "is not an id of this list")
    end = ids.index(before_id) if before_id is not None else len(ids)
    begin = ids.index(after_id) + 1 if after_id is not None else max(0, end - limit) if before_id is not None else 0
    page = batches[begin : min(end, begin + limit)]
    has_more = begin > 0 if before_id is not None else begin + limit < end
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return {"data": [_body(batch) for batch in page], "has_more": has_more, "first_id": ends[0], "last_id": ends[1]}


# ---- translation -----------------------------------------------------------------------------------------------------

# What became of the requests without an answer.
_REST = {BatchStatus.CANCELLED: "canceled", BatchStatus.EXPIRED: "expired"}


def _body(batch: BatchRecord) -> dict[str, Any]:
    has_ended, is_cancelling = batch.status.is_final, batch.status is BatchStatus.CANCELLING
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if has_ended:
        counts |= {"succeeded": batch.completed, "errored": batch.failed}
        counts[_REST.get(batch.status, "errored")] += batch.total - batch.completed - batch.failed
    else:
        counts["processing"] = batch.total
    ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "canceling" if is_cancelling else "in_progress",
        "request_counts": counts,
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(max((end for end in ends if end is not None), default=None)) if has_ended else None,
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        # Clients join it with the address that they know; this server may know another one of itself.
        "results_url": f"{PATH}/batches/{batch.id}/results" if has_ended else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: dict[str, Any] | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


def _open_files(owner: OwnerFolder, batch: BatchRecord) -> Sequence[BinaryIO]:
    """Open the files of a batch, the input last. They can be read to their end, also if they are deleted meanwhile."""
    ids = filter(None, (batch.output_file_id, batch.error_file_id, batch.input_file_id))
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(owner.files.content(file_id).open("rb")) for file_id in ids]
        except FileNotFoundError:
            raise APIError(404, "the files of this batch were deleted", code="not_found") from None
        opened.pop_all()
        return files


def _results(batch: BatchRecord, files: Sequence[BinaryIO]) -> Iterator[bytes]:
    with ExitStack() as opened:
        *answers, requests = [opened.enter_context(file) for file in files]
        yield from _all_results(batch, chain.from_iterable(answers), requests)


def _all_results(batch: BatchRecord, answers: Iterable[bytes], requests: Iterable[bytes]) -> Iterator[bytes]:
    answered: set[str] = set()
    for line in map(_decode_line, answers):
        answered.add(line.custom_id)
        yield _result(line.custom_id, _outcome(line))
    rest: dict[str, Any] = {"type": _REST.get(batch.status, "errored")}
    if rest["type"] == "errored":
        rest["error"] = _error("api_error", batch.problem or "the server could not run this batch")
    for line in map(_decode_line, requests):
        if line.custom_id not in answered:
            yield _result(line.custom_id, rest)


def _outcome(line: _Line) -> dict[str, Any]:
    if line.response is None:
        return {"type": "errored", "error": _error("invalid_request_error", str((line.error or {}).get("message")))}
    if line.response.status_code == 200:
        return {"type": "succeeded", "message": line.response.body}
    return {"type": "errored", "error": line.response.body}


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"
