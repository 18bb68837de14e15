"""Replicas on a Ray cluster by Ray Serve. Needs the extra ``minisgl-server[ray]``; importing this package does not.

    HTTP <-> proxy of Serve --- call per request ---> API, tokenizer workers --- call per request ---> Engine: ranks
                    ^---- ZeroMQ: events of streams ----'       ^------- ZeroMQ: output of each step -------'

- `app` declares the Serve deployments API and Engine.
- `api` runs the application of `minisgl_server.api`, and calls an engine for each request of the tokenizer workers.
- `engine` runs the ranks of one engine, and sends its output to the callers.
- `request_router` is Serve's request router for these calls; it asks the router of ``--router``.
- `proxy_middleware` is loaded by the proxy. It ends responses with an error if the replica of the API or the head is lost.
- `direct_streams` sends the events of streams from the API to this middleware, over the `connections` that engines have, too.
- `launch` is ``minisgl launch --executor ray --replicas``.

A call lasts as long as its request. So Serve counts requests, scales by them, lets them end before it stops a replica, and tells
when a replica is lost. Output tokens and events do not go through Serve, because its streaming costs too much per token: see
docs/ray.md.
"""

from typing import Any

from minisgl_core.errors import MinisglError

API_APP = "minisgl"
"""Serve application of the API."""
SERVE_ENVIRONMENT = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",  # calls by gRPC, with Ray's token, instead of Ray's actor calls
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Environment variables of Serve's processes, which make calls cheaper: see "Requests" in docs/ray.md."""


def build_app(config: dict[str, Any]) -> Any:
    """Return the Serve application, for a Serve config file with ``import_path: minisgl_server.ray:build_app``.

    `config` has options of ``minisgl launch`` by name, such as ``{"model": "Qwen/Qwen3-8B", "replicas": "2:8"}``. Its key
    ``autoscaling`` may have fields of Serve's AutoscalingConfig.
    """
    require_serve()
    from minisgl_server.ray.app import api, engines, parse

    engine_config, options, scaling = parse(config)
    return api(engine_config, options, engines(engine_config, options, scaling))


def require_serve() -> None:
    """Raise `MinisglError` if Ray Serve is not installed."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        remedy = "try: pip install 'minisgl-server[ray]'"
        raise MinisglError(f"Ray Serve is not installed ({error}); {remedy}") from None
