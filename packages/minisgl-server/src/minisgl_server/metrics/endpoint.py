"""Route ``GET /metrics``, which serves the values of all processes in prometheus_client's multiprocess mode.

The processes of a launch map files of its directory into memory and write their values there. Metrics that plugins in those
processes register with prometheus_client are served too.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import APIRouter, Request, Response

from minisgl_server.metrics.engine_metrics import DIRECTORY_VARIABLE

router = APIRouter()


_RESPONSES: dict[int | str, Any] = {
    200: {"description": "Success.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/metrics", response_class=Response, responses=_RESPONSES)
async def metrics(request: Request) -> Response:
    """Return all metrics in the format that Prometheus asks for."""
    body, media_type = await asyncio.to_thread(_collect, request.headers.get("accept", ""))
    return Response(body, media_type=None, headers={"Content-Type": media_type})


def _collect(accept: str) -> tuple[bytes, str]:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.multiprocess import MultiProcessCollector

    collector = MultiProcessCollector(None, os.environ[DIRECTORY_VARIABLE])  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    registry.register(_ConsistentCollector(collector))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


class _ConsistentCollector:
    """Collector whose KV cache usage matches its number of used pages: another process writes the two one after the other."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    def collect(self) -> list[Any]:
        """Return the metric families; prometheus_client calls this."""
        families = list(self._collector.collect())
        samples = {family.name: family.samples for family in families}
        used, total = (
            {tuple(sample.labels.items()): sample.value for sample in samples.get(name, ())}
            for name in ("minisgl_kv_pages_used", "minisgl_kv_pages")
        )
        usages = samples.get("minisgl_kv_cache_usage_perc", [])
        for index, sample in enumerate(usages):
            labels = tuple(sample.labels.items())
            if total.get(labels) and labels in used:
                usages[index] = sample._replace(value=used[labels] / total[labels])
        return families
