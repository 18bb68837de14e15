"""The OpenAPI document: every body and every status, for routes that read and write their bodies by themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from minisgl_core.sampling_params import MAX_LOGPROBS
from minisgl_server.api.answers import AnthropicError, Error
from minisgl_server.api.errors import ANTHROPIC_PATH
from minisgl_server.api.guard import is_open

ERRORS = {
    400: "The request is not valid; param names the field.",
    401: "No valid API key.",
    404: "There is no such model or response.",
    408: "The body stopped coming.",
    413: "The body is larger than --max-body-size, or holds more than the context could.",
    415: "The body is not JSON by its Content-Type, or compressed otherwise than by gzip or deflate.",
    429: "Too many requests run or wait; try again later.",
    500: "The server failed on this request.",
    503: "The engine is starting, or the server is shutting down.",
}
_UP_TO_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}
_BOUNDS: dict[str, Mapping[str, float]] = {
    **{key: {"minimum": 1} for key in ("max_tokens", "max_completion_tokens", "max_new_tokens")},
    **{key: {"minimum": 0} for key in ("min_tokens", "min_new_tokens")},
    **dict.fromkeys(("logprobs", "top_logprobs", "top_logprobs_num"), _UP_TO_LOGPROBS),
    **{key: {"minimum": -2, "maximum": 2} for key in ("presence_penalty", "frequency_penalty")},
    "n": {"minimum": 1, "maximum": 128},
    "temperature": {"minimum": 0, "maximum": 1e6},
    "top_k": {"minimum": -1},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 1e-6, "maximum": 1e6},
}
"""Bounds of `SamplingParams`, which checks them, by the field's name in any request. JSON Schema applies them to numbers only."""
_TEMPLATE = "#/components/schemas/{model}"

_described: set[type[BaseModel]] = {Error, AnthropicError}


def documented(
    body: type[BaseModel] | None = None,
    answer: type[BaseModel] | None = None,
    *,
    streams: type[BaseModel] | None = None,
    ends_with_done: bool = True,
    errors: Iterable[int] = (),
    is_ready: bool = True,
) -> dict[str, Any]:
    """Keyword arguments of a FastAPI route.

    Args:
        body: what the route reads.
        answer: what it answers with status 200; None for a route that never does.
        streams: what each server-sent event holds where the body asks for a stream.
        ends_with_done: the last event is ``[DONE]``; otherwise events are named by their types.
        errors: further statuses, keys of `ERRORS`. Those that any route may answer, or the guard before it, are added.
        is_ready: it answers 503 where the engine does not serve.
    """
    _described.update(each for each in (body, answer, streams) if each is not None)
    responses: dict[int | str, Any] = {}
    if answer is not None:
        content = {"application/json": {"schema": _reference(answer)}}
        if streams is not None:
            content["text/event-stream"] = {"itemSchema": _event(streams, ends_with_done)}
        responses[200] = {"description": "Success.", "content": content}
    for status in sorted({*errors, 500, *([503] if is_ready else [])}):
        responses[status] = _error(status)
    route: dict[str, Any] = {"responses": responses, "response_class": Response, "status_code": min(responses)}
    if body is not None:
        wanted = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
        route["openapi_extra"] = {"requestBody": wanted}
    return route


def install(app: FastAPI) -> None:
    """Make `app` serve the document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    with warnings.catch_warnings():
        # A route with several methods has one id, which is made unique below.
        warnings.filterwarnings("ignore", "Duplicate Operation ID")
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    models = sorted(_described, key=lambda model: model.__name__)
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_TEMPLATE)
    for definition in definitions["$defs"].values():
        if "additionalProperties" in definition:  # a request, or a part of one
            for name, described in definition.get("properties", {}).items():
                for keyword, bound in _BOUNDS.get(name, {}).items():
                    described.setdefault(keyword, bound)
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
            # FastAPI ends the id by any one of the route's methods, in the order of a set.
            operation["operationId"] = f"{operation['operationId'].rpartition('_')[0]}_{method}"
            responses.pop("422", None)  # FastAPI's own checks, which nothing here uses
            if is_open(path):
                operation["security"] = []
            else:
                responses["401"] = _error(401)
            if method == "post":
                responses |= {str(status): _error(status) for status in (408, 413, 415, 429)}
            if path.startswith(ANTHROPIC_PATH):
                for status in responses.keys() - {"200"}:
                    responses[status] = _error(int(status), AnthropicError)
    return document


def _error(status: int, body: type[BaseModel] = Error) -> dict[str, Any]:
    return {"description": ERRORS[status], "content": {"application/json": {"schema": _reference(body)}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _TEMPLATE.format(model=model.__name__)}


def _event(model: type[BaseModel], ends_with_done: bool) -> dict[str, Any]:
    """A server-sent event, in the words of OpenAPI 3.2, which 3.1 has none for."""
    chunk: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
    if ends_with_done:
        description = (
            f"One {model.__name__} each; then '[DONE]'. An error after the beginning is an event that holds an Error."
        )
        chunk["contentSchema"] = {"anyOf": [_reference(model), _reference(Error)]}
        properties: dict[str, Any] = {"data": {"anyOf": [{"const": "[DONE]"}, chunk]}}
    else:
        description = (
            f"One {model.__name__} each, named by its type. An error after the beginning is such an event too."
        )
        chunk["contentSchema"] = _reference(model)
        properties = {"event": {"type": "string"}, "data": chunk}
    return {"type": "object", "description": description, "properties": properties, "required": list(properties)}
