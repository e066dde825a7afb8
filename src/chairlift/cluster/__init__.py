"""Many machines: replicas of the server on an existing distributed engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def build_app(options: Mapping[str, Any]) -> Any:
    """The application for `serve run chairlift.cluster:build_app model=NAME replicas=2` and for Ray Serve's YAML files.

    `options` are those of `chairlift cluster serve`, with `_` instead of `-`.
    """
    from chairlift.cluster.serving.control import build_application

    return build_application(options)
