"""FastAPI application of the API server."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import version

from fastapi import FastAPI

from minisgl_core.plugins.hooks import Hook, Hooks
from minisgl_core.plugins.registry import Registry
from minisgl_server.api import errors, generate, health, tokenize
from minisgl_server.api.anthropic import routes as messages
from minisgl_server.api.engine_client import EngineClient
from minisgl_server.api.http.path_middleware import PathMiddleware
from minisgl_server.api.http.request_body import BodyMemory
from minisgl_server.api.openai import chat, completions, models
from minisgl_server.api.openai_responses import routes as responses
from minisgl_server.api.openai_responses.store import ResponseStore
from minisgl_server.api.openapi import openapi_document
from minisgl_server.api.public_paths import PublicPaths
from minisgl_server.metrics.endpoint import Families, collect_local, metrics_router
from minisgl_server.options import ServerOptions

_WEB_UI = "web_ui"
"""Name of the hook module of the web UI, which ``--web-ui`` enables; ``--plugin-routes`` enables all others."""


def create_app(
    client: EngineClient, options: ServerOptions, collect_metrics: Callable[[], Awaitable[Families]] = collect_local
) -> FastAPI:
    """Return the application; ``GET /metrics`` returns what `collect_metrics` collects.

    Plugins find `client`, `options` and `public_paths` in ``app.state``; see the hook `api_routes`.
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
    app.add_middleware(PathMiddleware, routes=app.router.routes)
    app.state.client, app.state.options = client, options
    app.state.public_paths = PublicPaths()
    app.state.body_memory = BodyMemory()
    app.state.response_store = ResponseStore(options.response_store_bytes)
    app.state.started = int(time.time())
    errors.add_error_handlers(app)
    app.openapi = cache(partial(openapi_document, app))  # type: ignore[method-assign]
    for module in (chat, completions, responses, messages, generate, tokenize, models, health):
        app.include_router(module.router)
    if options.metrics:
        app.include_router(metrics_router(collect_metrics))
    if hook := _api_routes(options):
        hook(app=app)
    return app


def _api_routes(options: ServerOptions) -> Hook | None:
    """Return the hook that calls the `api_routes` of the enabled plugins, or None if there are none."""
    if not (options.web_ui or options.plugin_routes):
        return None
    entries = Registry.from_environment().entries("hooks")
    enabled = [each for each in entries if (options.web_ui if each.name == _WEB_UI else options.plugin_routes)]
    return Hooks(Registry(enabled)).api_routes
