"""Builds the client of an engine from the options of the server."""

from __future__ import annotations

from chairlift.loading.resolve import resolve_model
from chairlift.server.config import ServerConfig
from chairlift.server.metrics import Metrics
from chairlift.server.process.engine_client import EngineClient


def make_engine(config: ServerConfig, metrics: Metrics) -> EngineClient:
    """Build the client of an engine that is not started yet."""
    return EngineClient(
        str(resolve_model(config.model, progress=not config.quiet)),
        config.engine,
        metrics.record_step,
        metrics.record_restart,
        config.supervision,
        log_level=config.log_level,
        module=config.engine_module,
    )
