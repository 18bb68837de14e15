"""Declaration of the Serve deployments API and Engine."""

from dataclasses import fields, replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from minisgl_core.config.options import EngineConfig, check_value, engine_options
from minisgl_core.config.provider_picker import check_providers
from minisgl_core.contracts.executor import ExecutorSpec
from minisgl_core.errors import InvalidValueError
from minisgl_core.plugins.registry import Registry
from minisgl_core.utils.exceptions import one_line
from minisgl_core.utils.suggestions import did_you_mean
from minisgl_server.launch.allowed_hosts import check_origins
from minisgl_server.launch.api_keys import api_key_digests
from minisgl_server.launch.api_workers import check_api_workers
from minisgl_server.options import ServerOptions
from minisgl_server.ray import SERVE_ENVIRONMENT
from minisgl_server.ray.api import API, requests_per_replica
from minisgl_server.ray.engine import HEALTH_CHECK_S, Engine

HEALTH_TIMEOUT_S = 2 * HEALTH_CHECK_S
"""Longest time that Serve waits for `Engine.check_health`, which raises an error after `HEALTH_CHECK_S` itself."""


def parse(config: dict[str, Any]) -> tuple[EngineConfig, ServerOptions, dict[str, Any]]:
    """Return the options in a Serve config file's ``args``, and those of Serve's autoscaling."""
    config = dict(config)
    scaling = config.pop("autoscaling", {})
    server_fields = {item.name: item for item in fields(ServerOptions)}
    engine_values = {name: config.pop(name) for name in list(config) if name in engine_options()}
    for name, value in config.items():
        if name not in server_fields:
            known = [*server_fields, *engine_options(), "autoscaling"]
            raise InvalidValueError(name, value, "an option of minisgl launch, by name", did_you_mean(name, known))
    server_values = {name: check_value(name, value, server_fields[name]) for name, value in config.items()}
    options = ServerOptions(**server_values)
    check_origins(options)
    check_api_workers(options)
    _check_scaling(scaling)
    return EngineConfig.from_flat(**engine_values), options, scaling


def _check_scaling(scaling: Any) -> None:
    """Check the names and values of Serve's AutoscalingConfig, which itself ignores unknown names."""
    if not isinstance(scaling, dict):
        raise InvalidValueError("autoscaling", scaling, "a mapping")
    known = [name for name in AutoscalingConfig.__fields__ if name not in ("min_replicas", "max_replicas")]
    for name, value in scaling.items():
        if name not in known:
            allowed = "a field of Ray Serve's AutoscalingConfig, without those that `replicas` sets"
            raise InvalidValueError(f"autoscaling.{name}", value, allowed, did_you_mean(name, known))
    try:
        AutoscalingConfig(**scaling)
    except ValueError as error:
        allowed = f"valid for Ray Serve's AutoscalingConfig ({one_line(error)})"
        raise InvalidValueError("autoscaling", scaling, allowed) from None


def engines(
    config: EngineConfig, options: ServerOptions, scaling: dict[str, Any], environment: dict[str, str] | None = None
) -> Application:
    """Return the deployment Engine, whose replicas each reserve what their ranks need, with these environment variables."""
    registry, parallel = Registry.from_environment(), config.parallel
    check_providers(config.flat(), registry)
    registry.entry("router", options.router)
    actor = _actor_options(environment)
    deployment_options: dict[str, Any] = {}
    spec = ExecutorSpec(parallel.tp, parallel.pp, parallel.placement, config.backends.platform)
    bundles, strategy = registry.load("executor", "ray").bundles(spec, ray.cluster_resources())
    if parallel.size == 1:  # its process is a child of the replica, which needs no other actor
        config = replace(config, parallel=replace(parallel, executor="local"))
        actor["num_gpus"] = bundles[0].get("GPU", 0)
    else:
        config = replace(config, parallel=replace(parallel, executor="ray"))
        actor["num_cpus"] = 0  # the ranks take all CPUs of the placement group
        deployment_options = {"placement_group_bundles": bundles, "placement_group_strategy": strategy}
    max_running = config.scheduler.max_running_requests
    config = with_queue_of_serve(config)
    low, high = options.replica_range
    if low < high:
        scaling = {"target_ongoing_requests": max_running, **scaling, "min_replicas": low, "max_replicas": high}
        deployment_options["autoscaling_config"] = AutoscalingConfig(**scaling)
    else:
        deployment_options["num_replicas"] = low
    deployment = serve.deployment(
        Engine,
        name="Engine",
        ray_actor_options=actor,
        logging_config=serve_logs(options),
        max_ongoing_requests=requests_per_replica(config),
        graceful_shutdown_timeout_s=options.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class="minisgl_server.ray.request_router.EngineRequestRouter"
        ),
        **deployment_options,
    )
    return deployment.bind(config, _deployed_options(options))


def with_queue_of_serve(config: EngineConfig) -> EngineConfig:
    """Return the config of a replica, whose scheduler never refuses a request: Serve and the API limit their number.

    All requests of a replica may wait in the scheduler. With overlap, ended ones keep their rows until the running step ends.
    """
    return replace(config, scheduler=replace(config.scheduler, max_queued_requests=requests_per_replica(config)))


def api(
    config: EngineConfig,
    options: ServerOptions,
    engines: Application | DeploymentHandle | str,
    environment: dict[str, str] | None = None,
) -> Application:
    """Return the deployment API. `engines` is the deployment Engine, or the name of the application that has it."""
    digests = api_key_digests(options)
    num_tokenizers = -(-(options.num_tokenizers or 1) // options.api_workers)  # of each replica
    # The web UI describes processes of one host.
    options = replace(_deployed_options(options), num_tokenizers=num_tokenizers, web_ui=False)
    deployment = serve.deployment(
        API,
        name="API",
        num_replicas=options.api_workers,
        ray_actor_options=_actor_options(environment),
        logging_config=serve_logs(options),
        max_ongoing_requests=100_000,  # high, as the API itself refuses requests beyond its limits
        graceful_shutdown_timeout_s=options.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return deployment.bind(config, options, digests, engines)


def serve_logs(options: ServerOptions) -> LoggingConfig:
    """Return the configuration of Serve's logs: without a line per request, which the API logs itself."""
    return LoggingConfig(log_level=options.log_level.upper(), enable_access_log=False)


def _deployed_options(options: ServerOptions) -> ServerOptions:
    """Return the options for a deployment: the maximum of ``--replicas``, and no API keys, as Serve would store them."""
    return replace(options, api_key=(), replicas=options.replica_range[1])


def _actor_options(environment: dict[str, str] | None) -> dict[str, Any]:
    return {"num_cpus": 1, "runtime_env": {"env_vars": SERVE_ENVIRONMENT | (environment or {})}}
