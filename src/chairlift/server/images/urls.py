"""Fetches images from the hosts that an operator allows, and never from private addresses.

A name is resolved once and every address of it is checked; the connection goes to the address that was checked, so that
a name cannot point elsewhere in between. Each redirect is checked in the same way.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from chairlift.errors import InvalidParameter

MAX_REDIRECTS = 3
SECONDS = 10.0  # The limit for all images of a request, redirects included.
MAX_BYTES = 20 << 20
_TOO_SLOW = f"the image cannot be fetched within {SECONDS:g} seconds"
_PORTS = {"http": 80, "https": 443}
_USER_AGENT = "chairlift"
# Python counts others as global, too, such as fec0::1 and ::127.0.0.1.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_IN_CLOUDS = ("168.63.129.16",)  # Machines on Azure reach its agents there, under an address like any other.


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The hosts that images may be fetched from, such as `example.com`, `*.example.com` or `example.com:8443`."""

    hosts: Sequence[str] = ()

    def fetch(self, url: str, parameter: str, deadline: float | None = None) -> bytes:
        """Fetch an image; raises InvalidParameter for what is not allowed or does not answer until `deadline`."""
        deadline = time.monotonic() + SECONDS if deadline is None else deadline
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._ask(url, parameter, deadline)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise InvalidParameter(parameter, f"is redirected more than {MAX_REDIRECTS} times")

    def _ask(self, url: str, parameter: str, deadline: float) -> bytes | str:
        """The image, or the URL that it has moved to."""
        scheme, host, port, target = self._allowed(url, parameter)
        addresses = _public_addresses(host, port, parameter)
        connection = _Connection(host, port, addresses[0], deadline, encrypted=scheme == "https")
        try:
            connection.request("GET", target, headers={"User-Agent": _USER_AGENT, "Accept": "image/*"})
            response = connection.getresponse()
            if response.status in (301, 302, 303, 307, 308):
                return urljoin(url, response.getheader("Location") or "")
            data = _read(response, parameter) if response.status == 200 else b""
        except InvalidParameter:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = _TOO_SLOW if time.monotonic() >= deadline else f"the image cannot be fetched: {error}"
            raise InvalidParameter(parameter, problem) from error
        finally:
            connection.stop()
        if time.monotonic() >= deadline:  # The connection was cut off, which reads like the end of the answer.
            raise InvalidParameter(parameter, _TOO_SLOW)
        if response.status != 200:
            raise InvalidParameter(parameter, f"the server of the image answered with {response.status}")
        return data

    def _allowed(self, url: str, parameter: str) -> tuple[str, str, int, str]:
        """Scheme, host, port and target of a URL that is allowed."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError as error:
            raise InvalidParameter(parameter, f"is no URL: {error}") from error
        if parts.scheme not in _PORTS or not host or parts.username is not None or not url.isprintable():
            raise InvalidParameter(parameter, "must be a data URL, or an http or https URL without a user")
        if not any(_matches(allowed, host, port, parts.scheme) for allowed in self.hosts):
            problem = f"images are not fetched from {host[:100]!r}; send a data URL, or start with --allow-image-urls"
            raise InvalidParameter(parameter, problem)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return parts.scheme, host, port or _PORTS[parts.scheme], target.replace(" ", "%20")


def _matches(allowed: str, host: str, port: int | None, scheme: str) -> bool:
    """Whether a host is allowed; an entry without a port allows the usual ones only."""
    name, _, own_port = allowed.partition(":") if allowed.count(":") == 1 else (allowed, "", "")
    if (port or _PORTS[scheme]) != (int(own_port) if own_port else _PORTS[scheme]):
        return False
    name, host = name.lower(), host.lower()
    return host.endswith(name[1:]) and len(host) >= len(name) if name.startswith("*.") else host == name


def _public_addresses(host: str, port: int, parameter: str) -> list[str]:
    """The addresses of a host, all of which are public."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidParameter(parameter, f"{host[:100]!r} has no address: {error}") from error
    addresses = [str(answer[4][0]) for answer in answers]
    for address in addresses:
        if not is_public(address):
            raise InvalidParameter(parameter, f"{host[:100]!r} is not a public address")
    return addresses


def is_public(address: str) -> bool:
    """Whether an address is on the public internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if address in _IN_CLOUDS:
        return False
    inner = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None)
    if inner is None and (teredo := getattr(parsed, "teredo", None)) is not None:
        inner = teredo[1]
    if isinstance(parsed, ipaddress.IPv6Address) and parsed in ipaddress.ip_network("64:ff9b::/96"):
        inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    if inner is not None:
        return is_public(str(inner))
    if parsed.version == 6 and parsed not in _GLOBAL_UNICAST:
        return False
    return parsed.is_global and not parsed.is_multicast


class _Connection(http.client.HTTPConnection):
    """A connection to one address, whatever the name resolves to by now, which is cut off at its deadline."""

    def __init__(self, host: str, port: int, address: str, deadline: float, *, encrypted: bool) -> None:
        super().__init__(host, port, timeout=max(0.1, deadline - time.monotonic()))
        self._address, self._encrypted, self._deadline = address, encrypted, deadline
        self._cut: threading.Timer | None = None
        self._same: socket.socket | None = None  # the socket under the encryption

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        # A timeout of a socket limits each of its reads, and a server may send a byte at a time.
        self._same = self.sock.dup()
        self._cut = threading.Timer(max(0.0, self._deadline - time.monotonic()), _cut_off, [self._same])
        self._cut.daemon = True
        self._cut.start()
        if self._encrypted:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)

    def stop(self) -> None:
        """Close it, which `close` does not where an answer is still to be read."""
        self.close()
        if self._cut is not None:
            self._cut.cancel()
        if self._same is not None:
            _cut_off(self._same)
            self._same.close()


def _cut_off(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _read(response: http.client.HTTPResponse, parameter: str) -> bytes:
    pieces, size = [], 0
    while piece := response.read(65536):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BYTES:
            raise InvalidParameter(parameter, f"has more than {MAX_BYTES:,} bytes")
    return b"".join(pieces)
