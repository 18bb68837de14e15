"""Errors in OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``, or in Anthropic's on its paths."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from minisgl_core.errors import InvalidValueError
from minisgl_core.protocol.messages import Rejected
from minisgl_core.utils.exceptions import shortened
from minisgl_core.utils.logs import REQUEST_ID
from minisgl_core.utils.suggestions import OTHER_NAMES, other_name
from minisgl_server.api.http.request_log import ANTHROPIC_PATH, access_record
from minisgl_server.api.unsupported_fields import UNSUPPORTED_PARTS, UNSUPPORTED_PATHS, UNSUPPORTED_REASONS

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000
"""Maximum length of an error message in characters; messages quote values of the request."""
MAX_PARAM = 200
"""Maximum length of a field's name in characters."""
_REJECTIONS = {
    "invalid": (400, None),
    "too_long": (400, "context_length_exceeded"),
    "queue_full": (429, "queue_full"),
    "replica_lost": (503, "replica_lost"),
}
"""Status and code by `Rejected.kind`. For no_replica see `no_replica`; all other kinds are internal errors."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """Error response. Retry-After is added to the `headers` of statuses 429 and 503."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message, param = shortened(message, MAX_MESSAGE), param and shortened(param, MAX_PARAM)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {"Retry-After": "1", **(headers or {})} if status in (429, 503) else dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON body in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self.response(scope["path"])(scope, receive, send)

    def response(self, path: str = "") -> Response:
        """Return the response, in the format of the API that `path` belongs to."""
        body = anthropic_body(self, REQUEST_ID.get()) if path.startswith(ANTHROPIC_PATH) else self.body()
        return Response(msgspec.json.encode(body), self.status, self.headers, media_type="application/json")


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the JSON body of an error in Anthropic's format."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def no_replica(retry_after_s: float = 1) -> ApiError:
    """Return the error of a request while no replica is ready."""
    headers = {"Retry-After": str(math.ceil(retry_after_s))}
    return ApiError(503, "No replica is ready; each is starting again.", code="no_replica", headers=headers)


def body_too_large(what: str) -> ApiError:
    """Return the error for "The body `what`.", which closes the connection: the rest of the body may still come."""
    return ApiError(413, f"The body {what}.", code="body_too_large", headers={"Connection": "close"})


def slow_client() -> ApiError:
    """Return the error of a stream whose client reads more slowly than the output is generated."""
    message = "The client reads the stream too slowly: the output that it has not read takes too much memory."
    return ApiError(408, message, code="slow_client")


def shutting_down() -> ApiError:
    """Return the error of a request that came during the shutdown."""
    return ApiError(503, "The server is shutting down.", code="shutting_down")


def model_not_found(name: str, served_name: str) -> ApiError:
    """Return the error of a model that is not served."""
    message = f"The model {name!r} does not exist; this server has {served_name!r}."
    return ApiError(404, message, param="model", code="model_not_found")


def rejected(message: Rejected) -> ApiError:
    """Return the error of a request that a tokenizer worker or the scheduler rejected."""
    if message.kind == "no_replica":
        return no_replica()
    status, code = _REJECTIONS.get(message.kind, (500, "internal_error"))
    return ApiError(status, message.message, message.param, code)


def invalid_value(error: InvalidValueError) -> ApiError:
    """Return the error of a value that is not allowed."""
    return ApiError(400, str(error), error.name)


def invalid_fields(errors: Sequence[ErrorDetails]) -> ApiError:
    """Return the most specific of pydantic's errors of the first invalid field."""
    # A field with a union of types has an error for each of them. The client probably meant the type whose error is deepest.
    # Among equally deep errors, one that is not about the type is preferred, and then the one with the highest list index.
    field_errors = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first = max(field_errors, key=_specificity)
    param = _field(first["loc"])
    if first["type"] == "extra_forbidden":
        # `_field` would leave out an unknown name that looks like a type.
        parent, name = _field(first["loc"][:-1]), str(first["loc"][-1])
        param = shortened(f"{parent}.{name}" if parent else name, MAX_PARAM)
        remedy = _reason(param).strip() or first.get("ctx", {}).get("hint", "")
        return ApiError(400, f"The field {param!r} is not supported. {remedy}".rstrip(), param, "unsupported_field")
    where = shortened(param or "", MAX_PARAM)
    if first["type"] == "beyond_context":
        message = f"{first['msg']}. Please reduce the length of the field {where!r}."
        return ApiError(400, message, param, "context_length_exceeded")
    # The reasons are about values that are not supported, and not about wrong types.
    reason = "" if first["type"].endswith(("_type", "_parsing")) else _reason(param)
    # pydantic's message about objects names the class of the model.
    what = "Input should be a JSON object" if first["type"] in ("model_type", "dict_type") else first["msg"]
    value = first.get("input")
    if where and isinstance(value, str | int | float):
        where += f"={shortened(repr(value[:60] if isinstance(value, str) else value), 60)}"
    return ApiError(400, f"{where}{': ' if where else ''}{what}.{reason}", param)


def _specificity(error: ErrorDetails) -> tuple[int, bool, list[int]]:
    indices = [part for part in error["loc"] if isinstance(part, int)]
    return len(error["loc"]), not error["type"].endswith("_type"), indices


def add_error_handlers(app: FastAPI) -> None:
    """Have `app` answer every exception with an error in the format of the API that was called."""

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, InvalidValueError):
            error = invalid_value(error)
        elif isinstance(error, RequestValidationError):
            # Routes validate bodies themselves, so each location begins with "path" or "query", which is no field.
            error = invalid_fields([each | {"loc": each["loc"][1:]} for each in error.errors()])
        elif not isinstance(error, ApiError):
            error = ApiError(500, "The server failed on this request.", code="internal_error")
        return error.response(request.url.path)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        remedy = f" {_other_path(app, request)}" if error.status_code == 404 else ""
        response = ApiError(error.status_code, f"{request.method} {path}: {error.detail}.{remedy}").response(path)
        response.headers.update(error.headers or {})
        if error.status_code == 405 and (route := request.scope.get("route")) is not None:
            # Starlette lists the methods of one route only, and a path may have several.
            methods = app.openapi()["paths"].get(route.path_format) or route.methods
            response.headers["Allow"] = ", ".join(sorted(method.upper() for method in methods))
        return response

    async def on_client_gone(request: Request, error: Exception) -> Response:
        access_record(request.scope).client_gone = True
        return Response(status_code=499)

    for kind in (ApiError, InvalidValueError, RequestValidationError, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_client_gone)


def _other_path(app: FastAPI, request: Request) -> str:
    """Return a remedy for a path without a route: often it has one ``/v1`` too few or too many, or is another server's."""
    path = request.url.path
    if (remedy := UNSUPPORTED_PATHS.get(path)) is not None:
        return remedy
    for other in (f"/v1{path}", path.removeprefix("/v1"), other_name(path, OTHER_NAMES) or path):
        if any(route.matches({**request.scope, "path": other})[0] is Match.FULL for route in app.routes):
            return f"Did you mean {other}?"
    return "GET /openapi.json lists the endpoints."


def _reason(param: str | None) -> str:
    """Return a space and the reason why a field or part is not supported, or an empty text."""
    names = re.split(r"[.[]", (param or "").removeprefix("sampling_params."))
    reason = UNSUPPORTED_PARTS.get(names[-1]) or UNSUPPORTED_REASONS.get(names[0])
    return f" {reason}" if reason else ""


def _field(loc: tuple[int | str, ...]) -> str | None:
    """Return a pydantic location as ``messages[0].role``, without the type names that unions add."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif (
            part.removesuffix("[]").isidentifier()
            and not part[0].isupper()
            and part not in ("str", "int", "float", "bool")
        ):
            name += f".{part}" if name else part
    return name or None
