"""Routes of the web UI: ``GET /``, the files below ``/web_ui/``, and ``GET /engine/state``."""

from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.types import Scope

from minisgl_server.api.openai.requests import json_response
from minisgl_server.api.openapi import route_docs
from minisgl_server.web_ui.engine_feed import EngineFeed

STATIC = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers of the web UI's files: no third-party or inline content, no frames, and browsers revalidate their caches."""


class EngineState(BaseModel):
    """Response of ``GET /engine/state``: the data of an `EngineSnapshot`, and a description of the engine."""

    engine: dict[str, Any]
    time_s: float
    step: int
    has_text: bool
    num_waiting: int
    num_running: int
    totals: dict[str, int]
    pages: dict[str, Any]
    requests: list[dict[str, Any]]
    nodes: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    replica: int
    replicas: list[dict[str, Any]]


def add_routes(app: FastAPI) -> None:
    """Add the web UI and the engine's state; the state has text of prompts and outputs only with ``--web-ui-prompts``.

    The web UI's files need no API key, as they are the same for everyone. The state needs one, like the other routes.
    """
    options = app.state.options
    feeds = [EngineFeed(app.state.client, options.web_ui_prompts, replica) for replica in range(options.replicas)]

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    step = Query(ge=0, lt=2**63, description="Number of a step; only later steps are returned.")
    index = Query(ge=0, lt=len(feeds), description="Index of a replica; while it is not ready, another one answers.")

    @app.get("/engine/state", **route_docs(EngineState, errors=[400]))
    async def state(since: Annotated[int, step] = 0, replica: Annotated[int, index] = 0) -> Response:
        """Return the engine's requests, steps, pages and prefix cache; with text only if the server has --web-ui-prompts."""
        return json_response(await feeds[replica].state(since))

    app.mount("/web_ui", _WebUiFiles(directory=STATIC))
    for path in ("/", "/web_ui/"):
        app.state.public_paths.add(path)


class _WebUiFiles(StaticFiles):
    """Static files, served with `HEADERS`."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
