"""Parsing responses from pieces of any size, and addresses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.client.http import Address, BadResponse, EventLineParser, ResponseReader
from chairlift.errors import InvalidParameter

BODY = b'data: {"a": 1}\n\ndata: [DONE]\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nda\r\nt\r\n%x\r\n%b\r\n0\r\n\r\n" % (
    len(BODY),
    BODY,
)
RESPONSES = {
    "chunked": (200, CHUNKED, b"da\r\nt" + BODY),
    "length": (
        429,
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\nA: b\r\n\r\n%b" % (len(BODY), BODY),
        BODY,
    ),
    "trailer": (200, CHUNKED[:-2] + b"X-After: 1\r\n\r\n", b"da\r\nt" + BODY),
    "empty": (204, b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", b""),
    "continue": (200, b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED, b"da\r\nt" + BODY),
}


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


@pytest.mark.parametrize("kind", RESPONSES)
@given(cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_a_response_is_parsed_equally_for_any_pieces(kind: str, cuts: list[int]) -> None:
    status, data, expected = RESPONSES[kind]
    body: list[bytes] = []
    reader = ResponseReader(body.append)
    for piece in pieces(data, cuts):
        assert not reader.done
        if piece:
            reader.feed(piece)
    assert reader.done
    assert reader.reusable
    assert b"".join(body) == expected
    assert reader.status == status


@given(cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_events_are_parsed_equally_for_any_pieces(cuts: list[int]) -> None:
    lines = EventLineParser()
    data = b': a comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b":2}\n\ndata: [DONE]\n\n'
    events = [event for piece in pieces(data, cuts) for event in lines.feed(piece)]
    assert events == [b'{"a": 1}', b'{"b":2}', b"[DONE]"]


def test_a_body_may_last_until_the_connection_is_closed() -> None:
    body: list[bytes] = []
    reader = ResponseReader(body.append)
    reader.feed(b"HTTP/1.0 200 OK\r\n\r\nab")
    reader.feed(b"c")
    assert not reader.done
    assert reader.close()
    assert not reader.reusable
    assert b"".join(body) == b"abc"


def test_a_truncated_response_is_incomplete() -> None:
    for end in (10, len(CHUNKED) - 2):
        reader = ResponseReader(lambda piece: None)
        reader.feed(CHUNKED[:end])
        assert not reader.close()


def test_a_connection_with_close_is_not_reused() -> None:
    reader = ResponseReader(lambda piece: None)
    reader.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\na")
    assert reader.done
    assert not reader.reusable


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nten\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 2000,
        b"a" * 70_000,
    ],
)
def test_an_invalid_response_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseReader(lambda piece: None).feed(data)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", Address("localhost", 8000, False, "")),
        ("localhost:8000", Address("localhost", 8000, False, "")),
        ("http://localhost:8000/v1/", Address("localhost", 8000, False, "")),
        ("https://example.org/api/v1", Address("example.org", 443, True, "/api")),
        ("http://[::1]:80", Address("::1", 80, False, "")),
    ],
)
def test_addresses(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected
    assert Address.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a/?q=1", "http://a b"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidParameter, match="url: "):
        Address.parse(url)
