"""Starts, inspects and stops a fleet on the Ray cluster that this process is connected to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import yaml

from chairlift.cluster.autoscaling import Autoscaler, AutoscalingSettings, FleetObservation, fleet_wait
from chairlift.cluster.options import ClusterOptions
from chairlift.cluster.serving.app import INGRESS, ingress_version, make_application, make_ingress, make_replicas
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.options import options_of
from chairlift.server.config import ServerConfig, server_config
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions

INTERVAL = 1.0  # seconds between decisions


class FleetScaling:
    def __init__(self, **settings: Any) -> None:
        self._autoscaler = Autoscaler(AutoscalingSettings(**settings))
        self._next = 0.0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Ray Serve's AutoscalingContext; returns the number of replicas to have, and no state."""
        now = time.monotonic()
        if now < self._next:
            return context.target_num_replicas, {}
        self._next = now + INTERVAL
        return self._autoscaler.desired(observe(context), now), {}


def observe(context: Any) -> FleetObservation:
    reported: dict[str, dict[Any, float]] = context.aggregated_metrics or {}

    def of_all(name: str) -> list[float]:
        return list(reported.get(name, {}).values())

    tpots = [value for value in of_all("tpot") if value]
    used = of_all("used")
    return FleetObservation(
        ready=len(context.running_replicas),
        wait=fleet_wait(of_all("wait")),
        used=sum(used) / len(used) if used else 0.0,
        tpot=sum(tpots) / len(tpots) if tpots else None,
        open_requests=round(sum(of_all("open")) + context.total_queued_requests),
    )


STATUS_SECONDS = 20.0
# Each server of a fleet would have its own files, and its own socket.
_SINGLE_SERVER = ("files_dir", "uds", "policy_switch")


def fleet_config(server: ServerOptions, model: str, engine: Mapping[str, Any], *, quiet: bool = False) -> ServerConfig:
    """Return the configuration of a fleet's servers, without options that need one single server."""
    for name in _SINGLE_SERVER:
        if getattr(server, name) is not None:
            raise InvalidParameter(name, "is not available in a cluster: each replica would have its own")
    if server.port == 0:  # an ingress that is started again must listen where the first one did
        raise InvalidParameter("port", "must not be 0 in a cluster")
    return server_config(server, model, dict(engine), quiet=quiet)


def build_application(options: Mapping[str, Any]) -> Any:
    """Return the application of Ray Serve for options by their names, as in a YAML file; texts are read as YAML."""
    groups = (ServerOptions, EngineOptions, ClusterOptions)
    kinds = {option.name: option.kind for group in groups for option in options_of(group)}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in kinds:
            raise InvalidParameter(name, "is not an option of `chairlift cluster serve`")
        values[name] = yaml.safe_load(value) if isinstance(value, str) and kinds[name] in (int, float, bool) else value

    def build(group: type) -> Any:
        return group(**{field.name: values[field.name] for field in fields(group) if field.name in values})

    server, engine, cluster = (build(group) for group in groups)
    return make_application(fleet_config(server, engine.model, engine.config(), quiet=engine.quiet), cluster)


def start_fleet(name: str, config: ServerConfig, options: ClusterOptions) -> str:
    """Start a fleet, or update the one of this name replica by replica, and return its address once it is ready."""
    from ray import serve

    serve.start(proxy_location="Disabled")
    is_update = is_running(name)
    _run(make_replicas(config, options), name)
    ingress, version = ingress_name(name), ingress_version(config, options)
    if _running_version(ingress) != version:
        try:
            _run(make_ingress(config, options, name), ingress)
        except ChairliftError:
            if not is_update:
                serve.delete(name)  # replicas that nothing can reach
            raise
    return str(_ingress_status(ingress)["address"])


def ingress_name(name: str) -> str:
    """The name of the application of a fleet's ingress."""
    return f"{name}-ingress"


def _run(application: Any, name: str) -> None:
    from ray import serve

    is_update = is_running(name)
    try:
        serve.run(application, name=name, route_prefix=None)
    except RuntimeError as error:
        if not is_update:  # otherwise replicas of the version before still answer
            serve.delete(name)
        raise ChairliftError(f"the fleet cannot start: {_last_line(str(error))}") from None


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def fleet_status(name: str) -> dict[str, Any]:
    """Return the state of a fleet, its address, and its replicas with their load."""
    from ray import serve

    app = serve.status().applications.get(name)
    if app is None:
        raise ChairliftError(f"there is no fleet {name!r} on this Ray cluster")
    found: dict[str, Any] = {"state": str(app.status.value).lower(), "problem": app.message}
    found["deployments"] = {
        part: {"state": str(one.status.value).lower(), "replicas": {str(k): v for k, v in one.replica_states.items()}}
        for part, one in app.deployments.items()
    }
    ingress_app = name if INGRESS in app.deployments else ingress_name(name)
    if not _has_ingress(ingress_app):  # the fleet is starting, or its ingress is being replaced
        return {**found, "address": None, "version": None, "pid": None, "router": None, "replicas": []}
    return {**found, **_ingress_status(ingress_app)}


def _has_ingress(app_name: str) -> bool:
    """Whether an ingress runs, which can be asked."""
    from ray import serve

    app = serve.status().applications.get(app_name)
    ingress = None if app is None else app.deployments.get(INGRESS)
    return ingress is not None and ingress.replica_states.get("RUNNING", 0) > 0


def _ingress_status(app: str) -> dict[str, Any]:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        handle = serve.get_deployment_handle(INGRESS, app)
        status: dict[str, Any] = handle.status.remote().result(timeout_s=STATUS_SECONDS)
    except (TimeoutError, KeyError, RayServeException) as error:  # KeyError: it is not deployed
        problem = f"the ingress {app!r} does not answer ({type(error).__name__})"
        raise ChairliftError(f"{problem}; see `serve status`, and start the fleet again") from None
    return status


def _running_version(app: str) -> str | None:
    """The version of an ingress; None if it is not there, or does not answer."""
    try:
        return str(_ingress_status(app)["version"]) if is_running(app) else None
    except ChairliftError:
        return None


def is_running(name: str) -> bool:
    from ray import serve

    return name in serve.status().applications


def stop_fleet(name: str) -> None:
    """Stop a fleet once its requests in flight are answered."""
    from ray import serve

    if not is_running(name):
        raise ChairliftError(f"there is no fleet {name!r} on this Ray cluster")
    for app in (ingress_name(name), name):  # first the ingress, which answers what it has accepted
        if is_running(app):
            serve.delete(app)
