"""Checks that protect a server without API keys from web pages.

The first is against DNS rebinding.

A browser lets a page call the server that it came from. The owner of a domain can point its name at a server on your
machine or network after the page has loaded, and the browser then treats that server as the page's own. But the browser
still sends the name in the Host header. Numeric addresses cannot be rebound, so they are allowed.

The second is against pages of other origins. A browser asks the server before it lets such a page send JSON, but not
before it sends a form, as an upload is. It always names the page's origin.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping

from chairlift.errors import InvalidParameter

ANY = "*"


class HostNames:
    def __init__(self, listens_on: str = "127.0.0.1", allowed: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        """`origins` are those of pages that may call the server."""
        self._origins = frozenset(origins)
        names = [_checked(name) for name in allowed]
        self._any = ANY in names
        self._names = {"localhost", listens_on.lower(), socket.gethostname().lower(), *names}

    def allow(self, host: str) -> bool:
        """Return whether a Host header is allowed. An empty one is, since browsers never send it."""
        name = without_port(host.strip().lower()).removesuffix(".")
        return self._any or not name or name in self._names or name.endswith(".localhost") or _is_address(name)

    def allow_page(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether the page that sends a request may do so. Clients that are no browsers are allowed."""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin", b"").decode("latin-1")
        if site in (b"same-origin", b"none") or ANY in self._origins or origin in self._origins:
            return True
        if not origin:
            return site is None
        host = headers.get(b"host", b"").decode("latin-1")
        return origin.partition("://")[2].lower() == host.strip().lower() != ""


def without_port(host: str) -> str:
    if host.startswith("["):  # an IPv6 address
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _checked(name: str) -> str:
    if not name.isascii() or not name.strip() or any(part in name for part in "/:@ "):
        raise InvalidParameter("allowed_host", f"must be the name of a host, without scheme or port, and not {name!r}")
    return name.lower()
