"""Steps that every generation route begins and ends with: parse the body, check the model, encode the response."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import EngineInfo
from minisgl_core.utils.logs import REQUEST_ID
from minisgl_server.api.errors import ApiError, invalid_fields, model_not_found
from minisgl_server.api.http.request_body import read_body
from minisgl_server.api.limits import RequestLimits

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")
P = ParamSpec("P")

_MAX_INLINE_BYTES = 2**16
"""Larger bodies are handled on a thread; see `run_in_thread_if_large`."""


async def parse_request(model: type[R], request: Request) -> R:
    """Read, decode and validate the body of a request.

    Raises:
        ApiError: 400, the body is invalid; 404, its model is not served; 413, 415 and 429, see `read_body`; 503, the engine is
            not ready.
        InvalidValueError: the priority is below `ServerOptions.min_priority`.
    """
    _, served = served_model(request.app)
    limits = request_limits(request.app)
    with request.app.state.body_memory.reserve(limits) as add_bytes:
        data = await read_body(request, limits, add_bytes)
        request.state.num_body_bytes = len(data)
        body = await run_in_thread_if_large(request, _validate, model, data, limits)
    if (name := getattr(body, "model", None)) not in (None, served):
        raise model_not_found(name, served)
    if getattr(body, "stream_options", None) is not None and not getattr(body, "stream", None):
        raise ApiError(400, "stream_options is allowed only if stream is true.", "stream_options")
    lowest, priority = request.app.state.options.min_priority, getattr(body, "priority", None) or 0
    if priority < lowest:
        raise InvalidValueError(
            "priority", priority, f"at least {lowest}", "The server's --min-priority allows lower ones."
        )
    return body


async def run_in_thread_if_large(request: Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function whose time grows with the body of `request`: on a thread if the body that `parse_request` read is large.

    The event loop waits only for single calls into pydantic, which hold the GIL: up to 0.3 s each within `RequestLimits`.
    """
    if request.state.num_body_bytes <= _MAX_INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def _validate(model: type[R], body: bytearray, limits: RequestLimits) -> R:
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    body.clear()
    try:
        return model.model_validate(data, context=limits)
    except ValidationError as error:
        raise invalid_fields(error.errors(include_url=False)) from None


def served_model(app: FastAPI) -> tuple[EngineInfo, str]:
    """Return the engine, and the name that its model is served under; raise status 503 if the engine is not ready."""
    info = app.state.client.ready_info()
    return info, app.state.options.served_model_name or info.model


def request_limits(app: FastAPI) -> RequestLimits:
    """Return the size limits of requests; raise status 503 if the engine is not ready."""
    return RequestLimits.of(served_model(app)[0], app.state.options.max_body_size)


def json_response(body: dict[str, Any] | list[dict[str, Any]]) -> Response:
    """Return a response of status 200 with a JSON body."""
    return Response(msgspec.json.encode(body), media_type="application/json")


def new_request_id(prefix: str) -> str:
    """Return a unique id with the X-Request-Id of this request, as clients may send the same one twice."""
    return f"{prefix}-{REQUEST_ID.get()}-{uuid.uuid4().hex[:16]}"
