"""Route ``GET /metrics``, which serves the values of all processes in prometheus_client's multiprocess mode.

The processes of a server map files of its directory into memory and write their values there. Metrics that plugins in those
processes register with prometheus_client are served too.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Request, Response

from minisgl_server.metrics.engine_metrics import DIRECTORY_VARIABLE

Families = list[Any]
"""Metric families of prometheus_client."""
_RESPONSES: dict[int | str, Any] = {
    200: {"description": "Success.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


async def collect_local() -> Families:
    """Return the metrics of the processes that share this one's directory."""
    return await asyncio.to_thread(_collect)


def metrics_router(collect: Callable[[], Awaitable[Families]] = collect_local) -> APIRouter:
    """Return the route; `collect` returns what it serves. Requests that arrive while it runs wait for the same result."""
    router = APIRouter()
    running: asyncio.Future[Families] | None = None

    @router.get("/metrics", response_class=Response, responses=_RESPONSES)
    async def metrics(request: Request) -> Response:
        """Return all metrics in the format that Prometheus asks for."""
        nonlocal running
        if running is None or running.done():
            running = asyncio.ensure_future(collect())
        families = await asyncio.shield(running)
        body, media_type = await asyncio.to_thread(_encode, families, request.headers.get("accept", ""))
        return Response(body, media_type=None, headers={"Content-Type": media_type})

    return router


def merge(replicas: Iterable[tuple[str, Families]]) -> Families:
    """Return the metrics of several engines of a cluster, given their names, which become the label ``replica``."""
    merged: dict[str, Any] = {}
    for name, families in replicas:
        for family in families:
            samples = [each._replace(labels={**each.labels, "replica": name}) for each in family.samples]
            if family.name in merged:
                merged[family.name].samples += samples
            else:
                merged[family.name], family.samples = family, samples
    return list(merged.values())


def _collect() -> Families:
    from prometheus_client.multiprocess import MultiProcessCollector

    collector: Any = MultiProcessCollector(None, os.environ[DIRECTORY_VARIABLE])  # type: ignore[no-untyped-call]
    return list(collector.collect())


def _encode(families: Families, accept: str) -> tuple[bytes, str]:
    from prometheus_client.exposition import choose_encoder

    encode, media_type = choose_encoder(accept)
    registry: Any = SimpleNamespace(collect=lambda: families)  # encoders use nothing else of a registry
    return encode(registry), media_type
