"""The FastAPI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from minisgl_server.api import chat, completions, errors
from minisgl_server.api.choices import json_response, served_model
from minisgl_server.api.engine_client import EngineClient

COUNT_TIMEOUT_S = 10.0


def create_app(client: EngineClient, served_model_name: str | None = None) -> FastAPI:
    """The API over an engine.

    Args:
        client: the way to the engine; run by the application's lifespan.
        served_model_name: the model's name to clients; the engine's name for it where it is missing.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(client.run())
        yield
        task.cancel()

    app = FastAPI(title="minisgl", summary="OpenAI-compatible API of a minisgl engine.", lifespan=lifespan)
    app.state.client = client
    app.state.served_model_name = served_model_name
    app.state.started = int(time.time())
    errors.install(app)
    app.include_router(chat.router)
    app.include_router(completions.router)

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Whether requests are served: 200, or 503 while the engine starts."""
        client.ready_info()
        return json_response({"status": "ok"})

    @app.get("/health/requests")
    async def requests(request: Request) -> Response:
        """How many requests each process holds, which also shows that all of them answer."""
        client.ready_info()
        try:
            return json_response(await asyncio.wait_for(client.count(), COUNT_TIMEOUT_S))
        except TimeoutError:
            raise errors.ApiError(503, "Not every process answers.", code="no_answer") from None

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [_model(request.app)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        """The model of that name."""
        served = served_model(request.app)[1]
        if name != served:
            raise errors.model_not_found(name, served)
        return json_response(_model(request.app))

    return app


def _model(app: FastAPI) -> dict[str, object]:
    info, name = served_model(app)
    return {
        "id": name,
        "object": "model",
        "created": app.state.started,
        "owned_by": "minisgl",
        "max_model_len": info.max_seq_len,
    }
