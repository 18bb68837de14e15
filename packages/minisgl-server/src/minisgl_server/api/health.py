"""Routes that tell if the server runs, if it serves, and its version."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from minisgl_server.api import errors
from minisgl_server.api.answers import Counts, Status, Version
from minisgl_server.api.choices import json_response
from minisgl_server.api.openapi import documented

COUNT_TIMEOUT_S = 10.0

router = APIRouter()


@router.get("/health", **documented(answer=Status, is_ready=False))
async def health() -> Response:
    """The process answers; whether it serves is told by /ready."""
    return json_response({"status": "ok"})


@router.get("/ready", **documented(answer=Status))
async def ready(request: Request) -> Response:
    """Whether requests are served: 503 while the engine starts and while the server shuts down."""
    request.app.state.client.ready_info()
    return json_response({"status": "ok"})


@router.get("/ping", **documented(answer=Status))
@router.post("/ping", **documented(answer=Status))
async def ping(request: Request) -> Response:
    """Answer as /ready does; SageMaker and clients of vLLM ask here, by either method. A body is not read."""
    return await ready(request)


@router.get("/version", **documented(answer=Version, is_ready=False))
async def tell_version(request: Request) -> Response:
    """Tell the version of minisgl-server."""
    return json_response({"version": request.app.version})


@router.get("/health/requests", **documented(answer=Counts))
async def requests(request: Request) -> Response:
    """How many requests each process holds, which also shows that all of them answer."""
    client = request.app.state.client
    client.ready_info()
    try:
        return json_response(await asyncio.wait_for(client.count(), COUNT_TIMEOUT_S))
    except TimeoutError:
        raise errors.ApiError(503, "Not every process answers.", code="no_answer") from None
