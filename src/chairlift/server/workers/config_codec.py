"""The server's configuration as bytes, for workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from chairlift.server.config import ServerConfig


def encode_config(config: ServerConfig) -> bytes:
    return msgspec.msgpack.encode(config, enc_hook=_encode_path)


def decode_config(data: bytes) -> ServerConfig:
    return msgspec.msgpack.decode(data, type=ServerConfig, dec_hook=_decode_path)


def _encode_path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _decode_path(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(kind)
