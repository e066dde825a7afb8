"""Server addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from chairlift.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed server URL. `root` is the path before /v1/…, usually empty."""

    host: str
    port: int
    tls: bool
    root: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL such as http://localhost:8000, with or without a scheme and a final /v1."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise InvalidParameter("url", f"has no valid port: {url!r}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidParameter("url", f"must look like http://localhost:8000, got {url!r}")
        if re.search(r"[\x00-\x20\x7f]", url):
            raise InvalidParameter("url", "must not have spaces or control characters in it")
        tls = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, root)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host_header}{self.root}"


def bearer(api_key: str) -> str:
    """An API key as the value of the Authorization header."""
    if not api_key.isascii() or not api_key.isprintable() or not api_key.strip():
        raise InvalidParameter("api_key", "must be printable ASCII")
    return f"Bearer {api_key}"
