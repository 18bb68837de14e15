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

    registry = CollectorRegistry()
    MultiProcessCollector(registry, os.environ[DIRECTORY_VARIABLE])  # type: ignore[no-untyped-call]
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type
