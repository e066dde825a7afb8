"""Incremental parser of HTTP/1.1 responses."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

MAX_HEAD = 64 * 1024
MAX_CHUNK_LINE = 1024


class BadResponse(Exception):
    """The received data is not a valid HTTP response."""


class _State(Enum):
    HEAD = auto()
    LENGTH = auto()  # a body of known length
    CHUNK_SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    UNTIL_CLOSE = auto()
    DONE = auto()


class ResponseReader:
    """Parses a response as its bytes arrive and passes the pieces of its body to `on_body`."""

    def __init__(self, on_body: Callable[[bytes], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._on_body = on_body
        self._state = _State.HEAD
        self._buffer = b""
        self._left = 0  # remaining bytes of the body or chunk

    @property
    def begun(self) -> bool:
        return self.status != 0 or bool(self._buffer)

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another request."""
        return self.done and self.headers.get("connection", "").lower() != "close" and not self._buffer

    def feed(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer and not self.done and self._advance():
            pass

    def close(self) -> bool:
        """Handle the end of the connection; return whether the response is complete."""
        if self._state is _State.UNTIL_CLOSE:
            self._state = _State.DONE
            self.headers["connection"] = "close"
        return self.done

    def _advance(self) -> bool:
        """Parse the next element; return False if more bytes are needed."""
        match self._state:
            case _State.HEAD:
                return self._read_head()
            case _State.LENGTH | _State.CHUNK:
                return self._read_known()
            case _State.UNTIL_CLOSE:
                self._on_body(self._take(len(self._buffer)))
                return True
            case _:
                return self._read_chunk_line()

    def _take(self, count: int) -> bytes:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _read_known(self) -> bool:
        piece = self._take(self._left)
        self._left -= len(piece)
        if not self._left:
            self._state = _State.DONE if self._state is _State.LENGTH else _State.CHUNK_END
        self._on_body(piece)
        return True

    def _read_chunk_line(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            if len(self._buffer) > MAX_CHUNK_LINE:
                raise BadResponse("a chunk without a size")
            return False
        line = self._take(end + 2)[:-2]
        if self._state is _State.CHUNK_SIZE:
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                raise BadResponse("a chunk without a size") from None
            self._state = _State.CHUNK if self._left else _State.TRAILER
        elif self._state is _State.CHUNK_END:
            self._state = _State.CHUNK_SIZE
        elif not line:  # the trailer ends with an empty line
            self._state = _State.DONE
        return True

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise BadResponse("a head without an end")
            return False
        first, *lines = self._take(end + 4)[:-4].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise BadResponse("no HTTP/1.1")
        if 100 <= int(words[1]) < 200:
            return True  # an informational response; the final one follows
        self.status = int(words[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        if words[0] == "HTTP/1.0":
            self.headers.setdefault("connection", "close")
        self._state = self._body_state()
        return True

    def _body_state(self) -> _State:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return _State.CHUNK_SIZE
        length = self.headers.get("content-length")
        if length is None:
            return _State.UNTIL_CLOSE
        if not length.isdigit():
            raise BadResponse("a length that is no number")
        self._left = int(length)
        return _State.LENGTH if self._left else _State.DONE


class EventLineParser:
    """Parses the bytes of a stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
