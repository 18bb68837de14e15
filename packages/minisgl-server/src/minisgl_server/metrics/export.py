"""From the process that counts to the one that is asked: prometheus_client's multiprocess mode.

Values lie in files of the launch's own directory, which the processes of the launch map into their memory. Whatever else in those
processes counts with prometheus_client, a plugin for instance, is served along.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from fastapi import APIRouter, Request, Response

from minisgl_server.metrics.engine import DIRECTORY_VARIABLE

router = APIRouter()


_DOCUMENTED: dict[int | str, Any] = {
    200: {"description": "Success.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.get("/metrics", response_class=Response, responses=_DOCUMENTED)
async def metrics(request: Request) -> Response:
    """Everything that was counted, for Prometheus."""
    body, media_type = await asyncio.to_thread(_collect, request.headers.get("accept", ""))
    return Response(body, media_type=None, headers={"Content-Type": media_type})


def _collect(accept: str) -> tuple[bytes, str]:
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.multiprocess import MultiProcessCollector

    collector = MultiProcessCollector(None, os.environ[DIRECTORY_VARIABLE])  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    registry.register(_InAgreement(collector))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


class _InAgreement:
    """What a collector finds, with the share of pages that goes with their number: it may fall between the writes of both."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    def collect(self) -> list[Any]:
        """For prometheus_client."""
        found = list(self._collector.collect())
        samples = {family.name: family.samples for family in found}
        used, total = (
            {tuple(sample.labels.items()): sample.value for sample in samples.get(name, ())}
            for name in ("minisgl_kv_pages_used", "minisgl_kv_pages")
        )
        shares = samples.get("minisgl_kv_cache_usage_perc", [])
        for place, sample in enumerate(shares):
            labels = tuple(sample.labels.items())
            if total.get(labels) and labels in used:
                shares[place] = sample._replace(value=used[labels] / total[labels])
        return found
