"""Routes of the Responses API, below ``/v1/responses``."""

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import create_model

from minisgl_core.errors import InvalidValueError
from minisgl_server.api.field_names import FieldNames
from minisgl_server.api.openai.chat import count_prompt_tokens, start_chat
from minisgl_server.api.openai.event_stream import EventStreamResponse
from minisgl_server.api.openai.requests import (
    json_response,
    parse_request,
    request_limits,
    run_in_thread_if_large,
    served_model,
)
from minisgl_server.api.openai.schemas import TranslatedChat
from minisgl_server.api.openai_responses.events import ResponseEvents
from minisgl_server.api.openai_responses.response_object import ResponseObject, new_id
from minisgl_server.api.openai_responses.schemas import (
    InputItems,
    InputItemsQuery,
    InputTokensRequest,
    PromptFields,
    ResponsesRequest,
    ResponsesResponse,
    RetrieveQuery,
)
from minisgl_server.api.openai_responses.store import ResponseStore
from minisgl_server.api.openai_responses.translate import Conversation, to_chat_request
from minisgl_server.api.openapi import route_docs

router = APIRouter()


class _ItemId(msgspec.Struct):
    id: str


_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
"""Finds the items of a list without decoding them, as a list may have 32 MiB and a client asks for few of them."""
_decode_id = msgspec.json.Decoder(_ItemId).decode
_STORED_DOCS: dict[str, Any] = {"errors": (400, 404), "needs_engine": False}
"""Arguments of `route_docs` that the routes of stored responses share."""
_Deleted = create_model("DeletedResponse", id=str, object=Literal["response"], deleted=Literal[True])
_InputTokens = create_model("InputTokensResponse", object=Literal["response.input_tokens"], input_tokens=int)
_ID_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@router.post("/v1/responses", **route_docs(ResponsesResponse, ResponsesRequest))
async def create(request: Request) -> Response:
    """Generate output items for a conversation."""
    _, model = served_model(request.app)
    body = await parse_request(ResponsesRequest, request)
    store: ResponseStore = request.app.state.response_store
    if body.store and not store.is_enabled:
        allowed = "false or left out, as this server stores no responses (--response-store-size is 0)"
        raise InvalidValueError("store", True, allowed)
    is_stored = store.is_enabled and body.store is not False
    chat, conversation, field_names = await _translate(request, body)
    items = await run_in_thread_if_large(request, _input_items, body) if is_stored else b""
    with field_names.renaming_errors():
        choices = await start_chat(request, chat, "resp")
    response = ResponseObject(body, model, is_stored, choices)

    def finish() -> dict[str, Any]:
        finished = response.finished()
        if is_stored:
            conversation.add_output(response.segments.all)
            finished["store"] = store.put(finished, items, conversation.without_instructions)
        return finished

    if body.stream:
        return EventStreamResponse(choices, ResponseEvents(response, finish))
    await choices.collect(lambda _, text: response.segments.push(text))
    return json_response(finish())


@router.post("/v1/responses/input_tokens", **route_docs(_InputTokens, InputTokensRequest))
async def input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt of a response, without generating it."""
    body = await parse_request(InputTokensRequest, request)
    chat, _, field_names = await _translate(request, body)
    with field_names.renaming_errors():
        count = await count_prompt_tokens(request, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}", **route_docs(ResponsesResponse, **_STORED_DOCS))
async def retrieve(request: Request, response_id: str, query: Annotated[RetrieveQuery, Query()]) -> Response:
    """Return a stored response."""
    # `query` is not used: FastAPI has refused all values that would change the answer.
    stored = request.app.state.response_store.get(response_id)
    return Response(stored.body, media_type="application/json")


@router.delete("/v1/responses/{response_id}", **route_docs(_Deleted, **_STORED_DOCS))
async def delete(request: Request, response_id: str) -> Response:
    """Delete a stored response."""
    request.app.state.response_store.delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", **route_docs(InputItems, **_STORED_DOCS))
async def input_items(request: Request, response_id: str, query: Annotated[InputItemsQuery, Query()]) -> Response:
    """List the input items of a stored response, without those of previous responses."""
    items = _decode_items(request.app.state.response_store.get(response_id).items)
    if query.order == "desc":
        items.reverse()
    if query.after:
        index = next((index for index, item in enumerate(items) if _decode_id(item).id == query.after), None)
        if index is None:
            raise InvalidValueError("after", query.after, "the id of one of the items")
        items = items[index + 1 :]
    shown = items[: query.limit]
    first_id, last_id = (_decode_id(shown[0]).id, _decode_id(shown[-1]).id) if shown else (None, None)
    ends = {"first_id": first_id, "last_id": last_id}
    return json_response({"object": "list", "data": shown, **ends, "has_more": len(shown) < len(items)})


async def _translate(request: Request, body: PromptFields) -> tuple[TranslatedChat, Conversation, FieldNames]:
    """Translate a request with `to_chat_request`. The messages of the previous responses are limited like a body."""
    previous_id = body.previous_response_id
    store: ResponseStore = request.app.state.response_store
    history = b"[]" if previous_id is None else store.get(previous_id, is_previous=True).messages
    request.state.num_body_bytes += len(history)
    with request.app.state.body_memory.reserve(request_limits(request.app)) as add_bytes:
        add_bytes(len(history))
        return await run_in_thread_if_large(request, to_chat_request, body, history)


def _input_items(body: ResponsesRequest) -> bytes:
    """Return the input as items with ids: a JSON list, which takes less memory than objects while the response is generated."""
    if isinstance(body.input, str):
        given: list[dict[str, Any]] = [{"role": "user", "content": body.input}]
    else:
        given = [item.model_dump(exclude_none=True) for item in body.input or ()]
    items = []
    for item in given:
        kind = item.get("type", "message")
        if isinstance(text := item.get("content"), str):
            part = {"type": "output_text", "annotations": []} if item["role"] == "assistant" else {"type": "input_text"}
            item["content"] = [{**part, "text": text}]
        defaults = {"id": new_id(_ID_PREFIXES.get(kind, "msg")), "type": kind, "status": "completed"}
        items.append({**defaults, **item})
    return msgspec.json.encode(items)
