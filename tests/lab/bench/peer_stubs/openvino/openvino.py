"""A stub of the package openvino."""

from __future__ import annotations

from typing import Any


class Tensor:
    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers
