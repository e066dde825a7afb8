"""Many machines: replicas of the server on an existing distributed engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.cluster.predictor import BatchPredictor

__all__ = ["BatchPredictor", "build_app"]


def build_app(options: Mapping[str, Any]) -> Any:
    """The application for `serve run chairlift.cluster:build_app model=NAME replicas=2` and for Ray Serve's YAML files.

    `options` are those of `chairlift cluster serve`, with `_` instead of `-`.
    """
    from chairlift.cluster.serving.fleet import build_application

    return build_application(options)


def __getattr__(name: str) -> Any:
    """Import the predictor on first use: the router, which simulations import, needs no engine."""
    if name != "BatchPredictor":
        raise AttributeError(f"module 'chairlift.cluster' has no attribute {name!r}")
    from chairlift.cluster.predictor import BatchPredictor

    return BatchPredictor
