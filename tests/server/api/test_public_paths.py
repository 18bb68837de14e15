from __future__ import annotations

import asyncio
import hashlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from minisgl_server.api.http.middleware import ApiKeyMiddleware
from minisgl_server.api.public_paths import PublicPaths


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 200), ("/health/", 200), ("/mine", 200), ("/files/a", 200), ("/mine/a", 401), ("/files", 401), ("/a", 401)],
)
def test_public_paths_of_plugins_need_no_key(path: str, status: int) -> None:
    public_paths = PublicPaths()
    for each in ("/", "/mine", "/files/"):
        public_paths.add(each)

    async def answer(request: Request) -> Response:
        return PlainTextResponse("here")

    app = Starlette(routes=[Route("/{path:path}", answer)])
    guarded = ApiKeyMiddleware(app, [hashlib.sha256(b"key").digest()], public_paths)

    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            headers = {"Authorization": "Bearer key"}
            return [(await http.get(path)).status_code, (await http.get(path, headers=headers)).status_code]

    assert asyncio.run(statuses()) == [status, 200]
