"""Which names the server goes by: what keeps other people's web pages away from a server that has no keys.

A browser lets a page talk to the server that the page came from. Whoever owns a name can let it point at a server on
your machine or in your network once the page is loaded (DNS rebinding), and the browser takes that server for theirs.
But it still says which name it was asked for. An address in digits cannot be made to point elsewhere: those are safe.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from chairlift.errors import InvalidParameter

ANY = "*"


class HostNames:
    def __init__(self, listens_on: str = "127.0.0.1", allowed: Iterable[str] = ()) -> None:
        given = [_checked(name) for name in allowed]
        self._any = ANY in given
        self._names = {"localhost", listens_on.lower(), socket.gethostname().lower(), *given}

    def include(self, host: str) -> bool:
        """`host` as the header says it: perhaps with a port. An empty one comes from no browser."""
        name = without_port(host.strip().lower()).removesuffix(".")
        return self._any or not name or name in self._names or name.endswith(".localhost") or _is_address(name)


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
