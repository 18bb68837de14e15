"""The FastAPI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from minisgl_core.plugins.hooks import Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_server.api import chat, completions, errors, health, models, native, openapi, tokens
from minisgl_server.api.anthropic import routes as messages
from minisgl_server.api.body import BodyMemory
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.paths import HeadAndSlashes
from minisgl_server.api.responses import routes as responses
from minisgl_server.api.responses.store import ResponseStore
from minisgl_server.metrics import export
from minisgl_server.options import ServerOptions
from minisgl_server.page.routes import add_page


def create_app(client: EngineClient, options: ServerOptions) -> FastAPI:
    """The API over an engine.

    Args:
        client: the way to the engine; run by the application's lifespan.
        options: the user's.

    Raises:
        Exception: whatever a plugin's `api_routes` raises, where the user asked for plugins' routes.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(client.run())
        yield
        task.cancel()

    summary = "OpenAI-compatible API of a minisgl engine."
    app = FastAPI(
        title="minisgl", summary=summary, version=version("minisgl-server"), lifespan=lifespan, redirect_slashes=False
    )
    app.add_middleware(HeadAndSlashes, routes=app.router.routes)
    app.state.client = client
    app.state.served_model_name = options.served_model_name
    app.state.trusts_chat_templates = options.trust_request_chat_template
    app.state.max_body_size = options.max_body_size
    app.state.body_memory = BodyMemory()
    app.state.response_store = ResponseStore(options.response_store_size)
    app.state.started = int(time.time())
    errors.install(app)
    openapi.install(app)
    for module in (chat, completions, responses, messages, native, tokens, models, health):
        app.include_router(module.router)
    if options.metrics:
        app.include_router(export.router)
    if options.page:
        add_page(app, client, options.page_prompts)
    if options.plugin_routes and (hook := Hooks(Registry.from_environment()).api_routes):
        hook(app=app)
    return app
