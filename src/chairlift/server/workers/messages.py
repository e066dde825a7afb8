"""Messages between the hub and its workers, and the channel that carries them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.access import APIKey
from chairlift.server.metrics import MetricSample
from chairlift.server.wire.errors import APIError, as_api_error
from chairlift.server.wire.messages import (
    DashboardFrame,
    Loaded,
    RecorderFault,
    RecordSteps,
    Submit,
    SwitchPolicy,
    Update,
)


class WireError(msgspec.Struct, frozen=True):
    """An error for a client."""

    message: str
    param: str | None = None
    status: int | None = None  # None: an invalid parameter, which endpoints may rename
    type_: str = ""
    code: str | None = None
    headers: dict[str, str] | None = None

    @classmethod
    def of(cls, error: Exception) -> WireError:
        if isinstance(error, InvalidParameter):
            return cls(error.problem, error.parameter)
        shown = as_api_error(error)
        body = shown.body["error"]
        headers = None if shown.headers is None else dict(shown.headers)
        return cls(body["message"], body["param"], shown.status_code, body["type"], body["code"], headers)

    def exception(self) -> Exception:
        if self.status is None:
            return InvalidParameter(self.param or "", self.message)
        return APIError(
            self.status, self.message, type_=self.type_, param=self.param, code=self.code, headers=self.headers
        )


# ---- to the worker ----------------------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag=True, frozen=True):
    """The first message. Not in the command line, which all users of the machine can read."""

    config: bytes
    chat_template: str | None
    keys: list[APIKey]


class EngineStatus(msgspec.Struct, tag=True, frozen=True):
    state: str
    loaded: Loaded | None


class Updates(msgspec.Struct, tag=True, frozen=True):
    updates: list[Update]


class StreamEnded(msgspec.Struct, tag=True, frozen=True):
    """The open completions of a stream end early."""

    request_id: str  # the first one of the stream
    reason: str
    error: WireError | None


class Reply(msgspec.Struct, tag=True, frozen=True):
    """The result of a call: of Reserve, BeginRequest, ChargeTokens or Scrape."""

    call: int
    value: Any = None
    error: WireError | None = None


class Displaced(msgspec.Struct, tag=True, frozen=True):
    """The reservation of this call was given to another tenant."""

    call: int


class SetKeys(msgspec.Struct, tag=True, frozen=True):
    keys: list[APIKey]


class SendSamples(msgspec.Struct, tag=True, frozen=True):
    """Send the worker's metrics."""


class Totals(msgspec.Struct, tag=True, frozen=True):
    """The metrics of the whole server, for dashboard pages of this worker."""

    values: dict[str, float]
    num_open: int


class SetWatching(msgspec.Struct, tag=True, frozen=True):
    """Whether any worker has an open dashboard page; only then the texts of requests are kept."""

    on: bool


class AskText(msgspec.Struct, tag=True, frozen=True):
    """Send the texts of a request for the dashboard, if this worker has them."""

    number: int
    request_id: str
    key: bytes | None


class ReloadCertificate(msgspec.Struct, tag=True, frozen=True):
    """Read the certificate again."""


class DrainWorker(msgspec.Struct, tag=True, frozen=True):
    """Refuse new requests, let those in flight finish, and exit."""


class StopWorker(msgspec.Struct, tag=True, frozen=True):
    """Exit."""


# ---- to the hub -------------------------------------------------------------------------------------------------


class Listening(msgspec.Struct, tag=True, frozen=True):
    """The worker accepts connections."""


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """Reserve capacity for sequences until the Release with the same number."""

    call: int
    num_prompts: int
    n: int
    tenant: str


class Release(msgspec.Struct, tag=True, frozen=True):
    """Undo a Reserve or a BeginRequest."""

    call: int


class SubmitAll(msgspec.Struct, tag=True, frozen=True):
    """All prompts of one HTTP request."""

    requests: list[Submit]


class CancelStream(msgspec.Struct, tag=True, frozen=True):
    request_id: str


class BeginRequest(msgspec.Struct, tag=True, frozen=True):
    call: int
    key: APIKey


class ChargeTokens(msgspec.Struct, tag=True, frozen=True):
    call: int
    begun: int  # the call of its BeginRequest
    tokens: int


class EndRequest(msgspec.Struct, tag=True, frozen=True):
    call: int  # the one of its BeginRequest
    unused: int


class Scrape(msgspec.Struct, tag=True, frozen=True):
    """Return the metrics of the whole server as text."""

    call: int


class FindText(msgspec.Struct, tag=True, frozen=True):
    """Return the texts of a request of another worker; a page of this one shows it."""

    call: int
    request_id: str
    key: bytes | None


class TextFound(msgspec.Struct, tag=True, frozen=True):
    """The answer to AskText; None if this worker has no such text."""

    number: int
    text: dict[str, str | bool] | None


class Samples(msgspec.Struct, tag=True, frozen=True):
    """All counters and histograms of a worker since its start."""

    samples: list[MetricSample]


ToWorker = (
    Configure
    | EngineStatus
    | Updates
    | StreamEnded
    | Reply
    | Displaced
    | SetKeys
    | SendSamples
    | Totals
    | SetWatching
    | AskText
    | ReloadCertificate
    | DrainWorker
    | StopWorker
    | DashboardFrame
    | RecorderFault
)
ToHub = (
    Listening
    | Reserve
    | Release
    | SubmitAll
    | CancelStream
    | BeginRequest
    | ChargeTokens
    | EndRequest
    | Scrape
    | FindText
    | TextFound
    | Samples
    | RecordSteps
    | SwitchPolicy
)

Received = TypeVar("Received")
Sent = TypeVar("Sent")

_encoder = msgspec.msgpack.Encoder()
_LENGTH_BYTES = 4


class Channel(Generic[Received, Sent]):
    """Messages in both directions over a pair of sockets. It ends when either process does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(received)

    @classmethod
    async def open(cls, end: socket.socket, received: Any) -> Channel[Received, Sent]:
        """`received` is the union of the messages that arrive."""
        reader, writer = await asyncio.open_unix_connection(sock=end, limit=2**20)
        return cls(reader, writer, received)

    def send(self, message: Sent) -> None:
        """Send without waiting. A message to a process that has exited is lost."""
        data = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    async def receive(self) -> Received:
        """Return the next message; raises EOFError when the other process has exited."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            message: Received = self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EOFError from None
        return message

    def close(self) -> None:
        self._writer.close()
