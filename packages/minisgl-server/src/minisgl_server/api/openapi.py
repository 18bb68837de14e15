"""OpenAPI document of the API. Routes parse and encode bodies without FastAPI, so they declare them with `route_docs`."""

import math
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from minisgl_core.sampling_params import INTEGER_BOUNDS, NUMBER_BOUNDS
from minisgl_server.api.http.request_log import ANTHROPIC_PATH
from minisgl_server.api.response_models import AnthropicErrorResponse, Error

ERRORS = {
    400: "The request is not valid; param names the field.",
    401: "No valid API key.",
    403: "The Host or Origin header is not allowed.",
    404: "The model or response does not exist.",
    408: "The body was not received in time.",
    413: "The body is larger than --max-body-size, or cannot fit the context.",
    415: "The Content-Type is not JSON, or the body is compressed.",
    429: "Too many requests run or wait; try again later.",
    500: "The server failed on this request.",
    503: "The engine is starting or has failed, or the server is shutting down.",
}
_OTHER_NAMES = {
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens", "max_new_tokens"), "max_tokens"),
    "min_new_tokens": "min_tokens",
    **dict.fromkeys(("top_logprobs", "top_logprobs_num"), "logprobs"),
}
"""Fields that `SamplingParams` calls differently."""
_TEMPLATE = "#/components/schemas/{model}"

_models: set[type[BaseModel]] = {Error, AnthropicErrorResponse}
"""Models that the document defines; `route_docs` adds those of its route."""


def route_docs(
    response: type[BaseModel],
    body: type[BaseModel] | None = None,
    *,
    errors: Iterable[int] = (),
    needs_engine: bool = True,
) -> dict[str, Any]:
    """Return the keyword arguments of a FastAPI route that document it.

    Args:
        response: model of the response of status 200.
        body: model of the request body. If it has a field ``stream``, the route can stream server-sent events, which OpenAPI 3.1
            cannot describe.
        errors: further statuses, keys of `ERRORS`. Those of any route, of a body and of the middleware are added.
        needs_engine: the route answers 503 if the engine's state is the reason not to succeed.
    """
    _models.add(response)
    content = {"application/json": {"schema": _reference(response)}}
    statuses = {*errors, 500, *([503] if needs_engine else [])}
    route: dict[str, Any] = {"response_class": Response}
    if body is not None:
        _models.add(body)
        statuses |= {400, 404} if "model" in body.model_fields else {400}
        if "stream" in body.model_fields:
            content["text/event-stream"] = {}
        request_body = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
        route["openapi_extra"] = {"requestBody": request_body}
    success = {"description": "Success.", "content": content}
    route["responses"] = {200: success, **{status: _error(status) for status in sorted(statuses)}}
    return route


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the document of an application."""
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    models = sorted(_models, key=lambda model: model.__name__)
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_TEMPLATE)
    for definition in definitions["$defs"].values():
        if "additionalProperties" in definition:  # a request model or a part of one
            for name, schema in definition.get("properties", {}).items():
                for keyword, bound in _bounds(name).items():
                    schema.setdefault(keyword, bound)
    schemas = {
        "schemas": definitions["$defs"],
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
    }
    document["components"] = schemas
    document["security"] = [{}, {"key": []}, {"x-api-key": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)  # FastAPI's status for invalid requests; `errors.add_error_handlers` answers 400
            responses["403"] = _error(403)
            if path in app.state.public_paths:
                operation["security"] = []
            else:
                responses["401"] = _error(401)
            if method == "post":
                responses |= {str(status): _error(status) for status in (408, 413, 415, 429)}
            if path.startswith(ANTHROPIC_PATH):
                for status in responses.keys() - {"200"}:
                    responses[status] = _error(int(status), AnthropicErrorResponse)
    return document


def _bounds(name: str) -> dict[str, float]:
    """Return the bounds that `SamplingParams` checks for a request field. JSON Schema applies them to numbers only."""
    name = _OTHER_NAMES.get(name, name)
    low, high = INTEGER_BOUNDS.get(name) or NUMBER_BOUNDS.get(name, (None, None))[:2]
    # `NUMBER_BOUNDS` has the smallest positive number, `math.ulp(0.0)`, for "above 0".
    lower = {"exclusiveMinimum": 0} if low == math.ulp(0.0) else {"minimum": low}
    return {keyword: bound for keyword, bound in {**lower, "maximum": high}.items() if bound is not None}


def _error(status: int, body: type[BaseModel] = Error) -> dict[str, Any]:
    return {"description": ERRORS[status], "content": {"application/json": {"schema": _reference(body)}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _TEMPLATE.format(model=model.__name__)}
