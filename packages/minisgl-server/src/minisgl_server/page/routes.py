"""``GET /``, its files, and ``GET /engine/state``."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

from minisgl_server.api.answers import EngineState
from minisgl_server.api.choices import json_response
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.errors import ApiError
from minisgl_server.api.openapi import documented
from minisgl_server.page.feed import StateFeed

STATIC = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Nothing from elsewhere, nothing inline, nobody's frame; browsers ask whether a file has changed."""
SINCE = {
    "name": "since",
    "in": "query",
    "description": "Number of a step: only later ones are told.",
    "schema": {"type": "integer", "minimum": 0, "default": 0},
}


def add_page(app: FastAPI, client: EngineClient, with_text: bool) -> None:
    """Serve the page and the state that it shows; text of prompts and outputs only with `with_text`.

    The files are open to everyone and hold nothing of anybody; the state needs a key where there are keys.
    """
    feed = StateFeed(client, with_text)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    @app.get("/engine/state", **documented(answer=EngineState, errors=[400]), openapi_extra={"parameters": [SINCE]})
    async def state(request: Request) -> Response:
        """What the engine does now: requests, steps, pages, and what the prefix cache holds; text with --page-prompts."""
        text = request.query_params.get("since", "0")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise ApiError(400, "since must be the number of a step.", "since")
        return json_response(await feed.state(int(text)))

    app.mount("/page", _Files(directory=STATIC))


class _Files(StaticFiles):
    """With the page's headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
