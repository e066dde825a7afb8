"""The applications of Ray Serve: a deployment of replicas, and an ingress in front of it.

Ray Serve replaces all actors of an application when it is deployed again. `chairlift cluster serve` therefore makes two
applications, so that an update of the replicas leaves the ingress alone, and with it the connections of clients.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from chairlift.byte_sizes import parse_bytes
from chairlift.cluster.options import ClusterOptions
from chairlift.cluster.ray_runtime import import_ray
from chairlift.cluster.serving.routing_table import REPLICAS, config_version
from chairlift.server.access import KeySources
from chairlift.server.config import ServerConfig, encode_config

INGRESS = "ingress"  # name of the deployment
SCALING_CLASS = "chairlift.cluster.serving.control:FleetScaling"
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
        host="",
        port=0,
        limits=limits,
    )


def ingress_config(config: ServerConfig) -> ServerConfig:
    """What the ingress needs: not the engine's options, so that a rolling update of replicas does not restart it."""
    return replace(config, engine={}, chat_template=None, tool_format=None)


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
