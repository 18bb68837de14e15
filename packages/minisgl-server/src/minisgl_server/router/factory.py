"""Construction of the router that ``--router`` selects."""

from minisgl_core.contracts.router import Router, RouterSpec, block_size_for
from minisgl_core.plugins.registry import Registry
from minisgl_core.protocol.messages import EngineInfo
from minisgl_server.options import ServerOptions


def make_router(options: ServerOptions, info: EngineInfo, registry: Registry) -> Router:
    """Return a router for the replicas of a server, with room for all blocks that their KV pools hold."""
    num_blocks = options.replicas * info.num_pages * info.page_size // block_size_for(info.page_size)
    spec = RouterSpec(options.replicas, num_blocks, options.router_overload_requests, options.router_overload_ratio)
    router: Router = registry.load("router", options.router)(spec)
    return router
