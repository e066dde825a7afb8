"""The channel between the hub and a worker: each end calls the methods that the other one declares here.

A method that is awaited is asked and answered; any other is only told. Told methods run in the order of their calls.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_type_hints

import msgspec

from chairlift.errors import InvalidParameter
from chairlift.server.access import APIKey
from chairlift.server.metrics import MetricSample
from chairlift.server.wire.errors import APIError, as_api_error
from chairlift.server.wire.messages import DashboardFrame, EngineCommand, Loaded, RecorderFault, Submit, Update

Text = dict[str, str | bool]  # What the dashboard shows of a request.


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


class ForWorker(Protocol):
    """What the hub calls of a worker."""

    def configure(self, config: bytes, chat_template: str | None, keys: list[APIKey]) -> None:
        """The first call. These are not in the command line, which all users of the machine can read."""

    def set_engine(self, state: str, loaded: Loaded | None) -> None: ...

    def deliver(self, updates: list[Update]) -> None: ...

    def end_stream(self, request_id: str, reason: str, error: WireError | None) -> None:
        """End the open completions of a stream early; `request_id` is its first one."""

    def displace(self, number: int) -> None:
        """End the request whose reservation was given to another tenant."""

    def reload(self, keys: list[APIKey]) -> None:
        """Replace the keys, and read the certificate again."""

    def set_totals(self, values: dict[str, float], num_open: int) -> None:
        """Set the metrics of the whole server, which dashboard pages show."""

    def watch(self, on: bool) -> None:
        """Say whether any worker has an open dashboard page; only then the texts of requests are kept."""

    def show(self, frame: DashboardFrame | RecorderFault) -> None: ...

    def shut_down(self, drain: bool) -> None:
        """Exit; with `drain`, refuse new requests and let those in flight finish before."""

    async def samples(self) -> list[MetricSample]:
        """Return all counters and histograms since the start."""

    async def find_text(self, request_id: str, key: bytes | None) -> Text | None: ...


class ForHub(Protocol):
    """What a worker calls of the hub. A `number` is the worker's name for what it is granted."""

    def listening(self) -> None:
        """The worker accepts connections."""

    def submit(self, requests: list[Submit]) -> None:
        """Submit all prompts of one HTTP request."""

    def cancel(self, request_id: str) -> None:
        """Cancel the stream whose first request this is."""

    def command(self, command: EngineCommand) -> None: ...

    async def reserve(self, number: int, num_prompts: int, n: int, tenant: str) -> None: ...

    async def begin(self, number: int, key: APIKey) -> dict[str, str]:
        """Count a request of a key; return the headers of its response, as `charge` does."""

    async def charge(self, number: int, tokens: int) -> dict[str, str]: ...

    def release(self, number: int, unused: int) -> None:
        """End what `reserve` or `begin` has granted; `unused` are tokens that were charged and not used."""

    async def exposition(self) -> bytes:
        """Return the metrics of the whole server as text."""

    async def find_text(self, request_id: str, key: bytes | None) -> Text | None:
        """Return the texts of a request of another worker; a page of this one shows it."""


class _Message(msgspec.Struct, array_like=True):
    """A call, or the answer to one."""

    method: str | None  # None: an answer
    number: int | None  # None: the call is not answered
    content: msgspec.Raw = msgspec.Raw(b"\xc0")  # the arguments or the result
    error: WireError | None = None


P = ParamSpec("P")
Result = TypeVar("Result")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode
_LENGTH_BYTES = 4


class Channel:
    """One end, over a pair of sockets. It ends when either process does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.last_message = time.monotonic()
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=end, limit=2**20))

    def tell(self, method: Callable[Concatenate[Any, P], None], *arguments: P.args, **_: P.kwargs) -> None:
        """Call a method of the other end without waiting. A call of a process that has exited is lost."""
        self._send(_Message(method.__name__, None, msgspec.Raw(_encode(arguments))))

    async def ask(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Result]], *arguments: P.args, **_: P.kwargs
    ) -> Result:
        """Call a method of the other end and return its result; raises ConnectionError if that process exits."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(_Message(method.__name__, number, msgspec.Raw(_encode(arguments))))
        try:
            result: Result = await answer
            return result
        finally:
            del self._asked[number]

    async def serve(self, receiver: object, declared: type) -> None:
        """Run the methods of the receiver that `declared` has, as they are called, until the other process exits."""
        arguments: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        for method, called in vars(declared).items():
            if not method.startswith("_"):
                types = tuple(kind for name, kind in get_type_hints(called).items() if name != "return")
                arguments[method] = msgspec.msgpack.Decoder(tuple[types])  # type: ignore[valid-type]
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
                message = _decode(await self._reader.readexactly(length))
                self.last_message = time.monotonic()
                if message.method is None:
                    self._take_answer(message)
                    continue
                given = arguments[message.method].decode(message.content)
                called = getattr(receiver, message.method)(*given)
                if message.number is not None:
                    task = asyncio.create_task(self._answer(message.number, called))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the other process has exited"))

    def close(self) -> None:
        self._writer.close()

    async def _answer(self, number: int, called: Coroutine[Any, Any, Any]) -> None:
        try:
            answer = _Message(None, number, msgspec.Raw(_encode(await called)))
        except Exception as error:
            answer = _Message(None, number, error=WireError.of(error))
        self._send(answer)

    def _take_answer(self, message: _Message) -> None:
        answer = None if message.number is None else self._asked.get(message.number)
        if answer is None or answer.done():
            return
        if message.error is not None:
            answer.set_exception(message.error.exception())
        else:
            answer.set_result(msgspec.msgpack.decode(message.content))

    def _send(self, message: _Message) -> None:
        data = _encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
