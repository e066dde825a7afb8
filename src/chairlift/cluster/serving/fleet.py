"""Starts, inspects and stops a fleet on the Ray cluster that this process is connected to.

A fleet is a deployment of replicas, and an ingress in front of it. Ray Serve replaces all actors of an application when
it is deployed again. `chairlift cluster serve` therefore makes two applications, so that an update of the replicas
leaves the ingress alone, and with it the connections of clients.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import yaml

from chairlift.cluster.autoscaling import Autoscaler, AutoscalingSettings, FleetObservation, fleet_wait
from chairlift.cluster.options import ClusterOptions
from chairlift.cluster.ray_runtime import import_ray
from chairlift.cluster.serving.routing_table import REPLICAS, config_version
from chairlift.errors import ChairliftError, InvalidParameter
from chairlift.options import options_of, parse_bytes
from chairlift.server.access import KeySources
from chairlift.server.config import ServerConfig, encode_config, server_config
from chairlift.server.options import ServerOptions
from chairlift.terminal.options import EngineOptions

INGRESS = "ingress"  # name of the deployment
SCALING_CLASS = "chairlift.cluster.serving.fleet:FleetScaling"
SCALING_SECONDS = 2.0  # The autoscaler gets a report this often.
ROUTER_CLASS = "chairlift.cluster.serving.request_router:FleetRequestRouter"
STATS_SECONDS = 1.0  # A replica reports its load this often.
HEALTH_SECONDS = 2.0  # Health is checked this often, which also finds out about killed actors.
HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives to the head node
INGRESS_HEADERS, INGRESS_HEADER_BYTES = 16, 8 * 2**10  # what an ingress may add to the headers of a client
UNLIMITED = 1_000_000  # requests do not pass through Ray, so that its limits mean nothing


def make_application(config: ServerConfig, options: ClusterOptions) -> Any:
    """Return a whole fleet as one application."""
    return make_ingress(config, options, make_replicas(config, options))


def make_replicas(config: ServerConfig, options: ClusterOptions) -> Any:
    """Return the application of the replicas; `config` is that of each server."""
    import_ray()
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from chairlift.cluster.serving.replica import ReplicaActor

    replicas = serve.deployment(
        ReplicaActor,
        name=REPLICAS,
        **replica_count(options),
        ray_actor_options=replica_resources(options),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER_CLASS,
            request_router_kwargs={"policy": options.router},
            request_routing_stats_period_s=STATS_SECONDS,
        ),
        **_supervision(config),
    )
    return replicas.bind(encode_config(replica_config(config)))


def make_ingress(config: ServerConfig, options: ClusterOptions, replicas: Any) -> Any:
    """Return the application of the ingress; `replicas` is that of the replicas, or the name of a running one."""
    import_ray()
    from ray import serve

    from chairlift.cluster.serving.ingress import Ingress

    placement = ingress_placement(options)
    ingress = serve.deployment(
        Ingress, name=INGRESS, num_replicas=options.ingresses, **placement, **_supervision(config)
    )
    return ingress.bind(
        replicas,
        encode_config(ingress_config(config)),
        options.router,
        ingress_version(config, options),
        shared=options.ingresses > 1,
    )


def ingress_version(config: ServerConfig, options: ClusterOptions) -> str:
    """Changes with everything that needs new ingresses."""
    placement = f"{options.router} {options.ingresses} {options.ingress_location} ".encode()
    files = repr(config.keys.read()).encode()  # the same files may have other contents
    if config.certificate is not None:
        found = (config.certificate.certfile, config.certificate.keyfile)
        files += b"".join(file.read_bytes() for file in found if file is not None and file.is_file())
    return config_version(placement + files + encode_config(ingress_config(config)))


def _supervision(config: ServerConfig) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": config.drain_timeout + 20,
        "max_ongoing_requests": UNLIMITED,
    }


def replica_config(config: ServerConfig) -> ServerConfig:
    """What the servers of replicas need: not what only the ingress does, so that its changes do not restart them."""
    limits = replace(
        config.limits,
        max_headers=config.limits.max_headers + INGRESS_HEADERS,
        max_header_bytes=config.limits.max_header_bytes + INGRESS_HEADER_BYTES,
    )
    return replace(
        config,
        keys=KeySources(),
        certificate=None,
        cors_origins=(),
        allowed_hosts=(),
        access_log=None,
        request_log=False,
        host="",
        port=0,
        limits=limits,
    )


def ingress_config(config: ServerConfig) -> ServerConfig:
    """What the ingress needs: not the engine's options, so that a rolling update of replicas does not restart it."""
    return replace(config, engine={}, tool_format=None)


def replica_count(options: ClusterOptions) -> dict[str, Any]:
    """A fixed number, or the settings of Ray Serve's autoscaling, which asks ours."""
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    settings = options.autoscaling()
    if settings is None:
        return {"num_replicas": options.replicas}
    policy = AutoscalingPolicy(policy_function=SCALING_CLASS, policy_kwargs=asdict(settings))
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=settings.min_replicas,
            initial_replicas=options.replicas,
            max_replicas=settings.max_replicas,
            metrics_interval_s=SCALING_SECONDS,
            look_back_period_s=2 * SCALING_SECONDS,
            upscale_delay_s=0,  # ours decides when
            downscale_delay_s=0,
            policy=policy,
        )
    }


def ingress_placement(options: ClusterOptions) -> dict[str, Any]:
    if options.ingress_location == "any":
        return {"ray_actor_options": {"num_cpus": 0}, "max_replicas_per_node": 1}
    return {"ray_actor_options": {"num_cpus": 0, "resources": {HEAD_NODE: 0.001}}}


def replica_resources(options: ClusterOptions) -> dict[str, Any]:
    resources: dict[str, Any] = {"num_cpus": options.replica_cpus, "num_gpus": options.replica_gpus}
    if options.replica_memory is not None:
        resources["memory"] = parse_bytes("replica_memory", options.replica_memory)
    return resources


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
_SINGLE_SERVER = ("files_dir", "responses_dir", "uds", "policy_switch")


def fleet_config(
    server: ServerOptions, model: str, engine: Mapping[str, Any], *, quiet: bool = False, verbose: bool = False
) -> ServerConfig:
    """Return the configuration of a fleet's servers, without options that need one single server."""
    for name in _SINGLE_SERVER:
        if getattr(server, name) is not None:
            raise InvalidParameter(name, "is not available in a cluster: each replica would have its own")
    if server.port == 0:  # an ingress that is started again must listen where the first one did
        raise InvalidParameter("port", "must not be 0 in a cluster")
    return server_config(server, model, dict(engine), quiet=quiet, verbose=verbose)


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


def _applications() -> Mapping[str, Any]:
    """The applications of Ray Serve, by name."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        applications: Mapping[str, Any] = serve.status().applications
        return applications
    except (RayError, RayServeException) as error:
        problem = f"Ray Serve does not answer ({type(error).__name__}): it starts or ends just now"
        raise ChairliftError(f"{problem}; try again in some seconds") from None


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
    app = _applications().get(name)
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
    app = _applications().get(app_name)
    ingress = None if app is None else app.deployments.get(INGRESS)
    return ingress is not None and ingress.replica_states.get("RUNNING", 0) > 0


def _ingress_status(app: str) -> dict[str, Any]:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        handle = serve.get_deployment_handle(INGRESS, app)
        status: dict[str, Any] = handle.status.remote().result(timeout_s=STATUS_SECONDS)
    except (TimeoutError, KeyError, RayError, RayServeException) as error:  # KeyError: it is not deployed
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
    return name in _applications()


def stop_fleet(name: str) -> None:
    """Stop a fleet once its requests in flight are answered."""
    from ray import serve

    if not is_running(name):
        raise ChairliftError(f"there is no fleet {name!r} on this Ray cluster")
    for app in (ingress_name(name), name):  # first the ingress, which answers what it has accepted
        if is_running(app):
            serve.delete(app)
