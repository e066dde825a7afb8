"""Images are fetched from allowed hosts with public addresses only."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from chairlift.errors import InvalidParameter
from chairlift.server.images import urls
from chairlift.server.images.urls import AllowedHosts, is_public

PRIVATE = [
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::ffff:169.254.169.254"),
    *("fec0::1", "::7f00:1", "::ffff:0:7f00:1", "64:ff9b:1::7f00:1", "168.63.129.16", "::ffff:168.63.129.16"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0x7f000001", "2130706433", "127.1", "0"])
def test_names_of_this_machine_are_refused_even_if_they_are_allowed(host: str) -> None:
    for scheme in ("http", "https"):
        with pytest.raises(InvalidParameter, match="image_url"):
            AllowedHosts([host.strip("[]"), host]).fetch(f"{scheme}://{host}/a.png", "image_url")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/a.png",
        "https://images.example.org.evil.com/a.png",
        "https://evil.com/images.example.org",
        "https://images.example.org@evil.com/",
        "https://user:word@images.example.org/",
        "https://images.example.org:8443/",
        "ftp://images.example.org/",
        "file:///etc/passwd",
        "gopher://images.example.org/",
        "https://images.example.org\r\nHost: a/",
        "https://",
        "//images.example.org/",
        "https://images.example.org:x/",
    ],
)
def test_urls_that_are_not_allowed(url: str) -> None:
    with pytest.raises(InvalidParameter, match="image_url"):
        AllowedHosts(["images.example.org"]).fetch(url, "image_url")


class _Pictures(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        while self.path == "/slow-head":
            self.wfile.write(b"HTTP/1.1 100 Go on\r\n\r\n")
            time.sleep(0.02)
        to = {"/local": "http://127.0.0.1:1/", "/loop": "/loop", "/other": "http://other.example/"}
        to |= {"/bad": "http://[a/", "/moved": "/a.png"}
        self.send_response(302 if self.path in to else 404 if self.path == "/none" else 200)
        if self.path in to:
            self.send_header("Location", to[self.path])
        self.end_headers()
        while self.path == "/slow":  # a byte at a time, so that no single read takes long
            self.wfile.write(b".")
            time.sleep(0.02)
        if self.path == "/a.png":
            self.wfile.write(b"a picture of " + self.headers["Host"].encode())

    def log_message(self, *further: Any) -> None:
        """Say nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server whose host has a name, and an address that counts as public."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = socket.getaddrinfo

    def answer(host: str, *further: Any, **options: Any) -> Any:
        return asked("127.0.0.1" if host.endswith(".example") else host, *further, **options)

    monkeypatch.setattr(urls.socket, "getaddrinfo", answer)
    monkeypatch.setattr(urls, "is_public", lambda address: True)
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_allowed_hosts_are_fetched_from(port: int) -> None:
    hosts = AllowedHosts([f"images.example:{port}"])
    for path in ("a.png", "moved"):
        data = hosts.fetch(f"http://images.example:{port}/{path}", "image_url")
        assert data == f"a picture of images.example:{port}".encode()


@pytest.mark.parametrize("path", ["local", "loop", "other", "none", "bad"])
def test_redirects_are_checked(path: str, port: int) -> None:
    with pytest.raises(InvalidParameter, match="image_url"):
        AllowedHosts([f"*.example:{port}"]).fetch(f"http://images.example:{port}/{path}", "image_url")


def test_large_answers_are_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "MAX_BYTES", 5)
    with pytest.raises(InvalidParameter, match="more than 5 bytes"):
        AllowedHosts([f"images.example:{port}"]).fetch(f"http://images.example:{port}/a.png", "image_url")


@pytest.mark.parametrize("path", ["slow", "slow-head"])
def test_slow_answers_are_cut_off(path: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "SECONDS", 0.3)
    with pytest.raises(InvalidParameter, match="cannot be fetched within"):
        AllowedHosts([f"images.example:{port}"]).fetch(f"http://images.example:{port}/{path}", "image_url")
