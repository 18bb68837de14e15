"""``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.chat import count_prompt_tokens, run_chat
from minisgl_server.api.choices import json_response, parse, served_model
from minisgl_server.api.errors import ApiError
from minisgl_server.api.openapi import documented
from minisgl_server.api.responses.answers import (
    InputItems,
    InputTokens,
    ResponseAnswer,
    ResponseEvent,
    StoredAnswer,
)
from minisgl_server.api.responses.body import ResponseBody, new_id
from minisgl_server.api.responses.events import ResponseEvents
from minisgl_server.api.responses.schemas import InputTokensRequest, PromptFields, ResponsesRequest
from minisgl_server.api.responses.store import ResponseStore
from minisgl_server.api.responses.translate import chat_of, message_of, template_hints
from minisgl_server.api.streaming import EventStream

router = APIRouter()

_MAX_ITEMS = 100
_ID_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@router.post(
    "/v1/responses",
    **documented(ResponsesRequest, ResponseAnswer, streams=ResponseEvent, ends_with_done=False, errors=(400, 404)),
)
async def create(request: Request) -> Response:
    """Answer a conversation with output items."""
    _, model = served_model(request.app)
    asked = await parse(ResponsesRequest, request)
    store = _store(request)
    if asked.store and not store.is_on:
        allowed = "false or left out, as this server keeps no responses (--response-store-size is 0)"
        raise InvalidValueError("store", True, allowed)
    is_stored = store.is_on and asked.store is not False
    chat, conversation, names = chat_of(asked, _history(store, asked))
    with names.errors():
        run = await run_chat(request, chat, "resp", template_hints(asked))
    response = ResponseBody(asked, model, is_stored, run.choices)

    def finish() -> dict[str, Any]:
        body = response.finished(is_stored)
        messages = [*conversation.lasting, message_of(response.segments.all)]
        if is_stored and not store.put(body, _input_items(asked), messages):
            body["store"] = False
        return body

    if asked.stream:
        return EventStream(*run, ResponseEvents(response, finish))
    await run.collect(lambda _, text: response.segments.push(text))
    return json_response(finish())


@router.post("/v1/responses/input_tokens", **documented(InputTokensRequest, InputTokens, errors=(400, 404)))
async def input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a response would begin with."""
    served_model(request.app)
    asked = await parse(InputTokensRequest, request)
    chat, _, names = chat_of(asked, _history(_store(request), asked))
    with names.errors():
        count = await count_prompt_tokens(request, chat, template_hints(asked))
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.api_route(
    "/v1/responses/{response_id}",
    methods=["GET", "DELETE"],
    **documented(answer=StoredAnswer, errors=(400, 404), is_ready=False),
)
async def retrieve_or_delete(request: Request, response_id: str) -> Response:
    """Return a stored response, or forget it. One route has both, so that ``Allow`` names both."""
    if request.method == "DELETE":
        _query(request, {})
        _store(request).delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})
    _query(request, {"stream": ("false",)})
    return Response(_store(request).get(response_id).body, media_type="application/json")


@router.post("/v1/responses/{response_id}/cancel", **documented(errors=(400, 404), is_ready=False))
async def cancel(request: Request, response_id: str) -> Response:
    """Refuse: there are no responses that run in the background."""
    _store(request).get(response_id)
    message = "Only a response that runs in the background can be cancelled, and this server refuses background=true."
    raise ApiError(400, message, "response_id", "unsupported_operation")


@router.get(
    "/v1/responses/{response_id}/input_items", **documented(answer=InputItems, errors=(400, 404), is_ready=False)
)
async def input_items(request: Request, response_id: str) -> Response:
    """List the input items of a stored response, without those of the responses before it."""
    query = _query(request, {"limit": None, "order": ("asc", "desc"), "after": None})
    limit = query.get("limit", "20")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_ITEMS:
        raise InvalidValueError("limit", limit, f"a number from 1 to {_MAX_ITEMS}")
    items: list[dict[str, Any]] = msgspec.json.decode(_store(request).get(response_id).items)
    if query.get("order", "desc") == "desc":
        items.reverse()
    if after := query.get("after"):
        place = next((place for place, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise InvalidValueError("after", after, "the id of one of the items")
        items = items[place + 1 :]
    shown = items[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": shown, **ends, "has_more": len(shown) < len(items)})


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.response_store
    return store


def _history(store: ResponseStore, asked: PromptFields) -> list[dict[str, Any]]:
    return [] if asked.previous_response_id is None else store.history(asked.previous_response_id)


def _query(request: Request, known: Mapping[str, tuple[str, ...] | None]) -> Mapping[str, str]:
    """Return the query's fields, each with one of its known values or, where these are None, any."""
    for name, value in request.query_params.items():
        if name not in known:
            raise ApiError(400, f"The field {name[:80]!r} is not supported.", name[:80], "unsupported_field")
        if (values := known[name]) is not None and value not in values:
            raise InvalidValueError(name, value, f"{' or '.join(values)}")
    return request.query_params


def _input_items(asked: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input as items that have ids."""
    if isinstance(asked.input, str):
        given: list[dict[str, Any]] = [{"role": "user", "content": asked.input}]
    else:
        given = [item.model_dump(exclude_none=True) for item in asked.input or ()]
    items = []
    for item in given:
        kind = item.get("type", "message")
        if isinstance(text := item.get("content"), str):
            part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
            item["content"] = [{**part, "text": text}]
        defaults = {"id": new_id(_ID_PREFIXES.get(kind, "msg")), "type": kind, "status": "completed"}
        items.append({**defaults, **item})
    return items
