"""Routes for liveness, readiness and the version."""

import asyncio
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import create_model

from minisgl_server.api.errors import ApiError
from minisgl_server.api.openai.requests import json_response
from minisgl_server.api.openapi import route_docs
from minisgl_server.api.response_models import Counts

COUNT_TIMEOUT_S = 10.0

router = APIRouter()

_Status = create_model("Status", status=Literal["ok"])


@router.get("/health", **route_docs(_Status))
async def health(request: Request) -> Response:
    """Answer 200 while the process runs, and 503 if all replicas fail repeatedly; /ready tells if requests are served."""
    request.app.state.client.check_replicas()
    return json_response({"status": "ok"})


@router.get("/ready", **route_docs(_Status))
async def ready(request: Request) -> Response:
    """Answer 200 if requests are served, and 503 while the engine starts or the server shuts down."""
    request.app.state.client.ready_info()
    return json_response({"status": "ok"})


@router.get("/ping", **route_docs(_Status))
@router.post("/ping", **route_docs(_Status))
async def ping(request: Request) -> Response:
    """Answer as /ready does; SageMaker and clients of vLLM send GET or POST here. A body is not read."""
    return await ready(request)


@router.get("/version", **route_docs(create_model("Version", version=str), needs_engine=False))
async def get_version(request: Request) -> Response:
    """Return the version of minisgl-server."""
    return json_response({"version": request.app.version})


@router.get("/health/requests", **route_docs(Counts))
async def requests(request: Request) -> Response:
    """Return the requests that this API worker, its tokenizer workers, the router and the schedulers hold, and the locked pages.

    An answer shows that these processes respond.
    """
    client = request.app.state.client
    client.ready_info()
    try:
        return json_response(await asyncio.wait_for(client.count(), COUNT_TIMEOUT_S))
    except TimeoutError:
        message = f"A process of the server has not answered within {COUNT_TIMEOUT_S:g} s; its log may say why."
        raise ApiError(503, message, code="no_answer") from None
