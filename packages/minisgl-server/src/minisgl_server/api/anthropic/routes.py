"""Routes of the Messages API, below ``/v1/messages``."""

from fastapi import APIRouter, Request, Response
from pydantic import create_model

from minisgl_server.api.anthropic.events import MessageEvents
from minisgl_server.api.anthropic.schemas import CountTokensRequest, MessageResponse, MessagesRequest
from minisgl_server.api.anthropic.translate import to_chat_request
from minisgl_server.api.openai.chat import count_prompt_tokens, start_chat
from minisgl_server.api.openai.event_stream import EventStreamResponse
from minisgl_server.api.openai.requests import json_response, parse_request, run_in_thread_if_large, served_model
from minisgl_server.api.openapi import route_docs

router = APIRouter()


@router.post("/v1/messages", **route_docs(MessageResponse, MessagesRequest))
async def messages(request: Request) -> Response:
    """Generate content blocks for a conversation."""
    _, model = served_model(request.app)
    body = await parse_request(MessagesRequest, request)
    chat, field_names = await run_in_thread_if_large(request, to_chat_request, body)
    with field_names.renaming_errors():
        choices = await start_chat(request, chat, "msg")
    message = MessageEvents(model, choices)
    if body.stream:
        return EventStreamResponse(choices, message)
    await choices.collect(lambda _, text: message.segments.push(text))
    return json_response(message.finished())


@router.post(
    "/v1/messages/count_tokens", **route_docs(create_model("TokenCount", input_tokens=int), CountTokensRequest)
)
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt of a message, without generating it."""
    body = await parse_request(CountTokensRequest, request)
    chat, field_names = await run_in_thread_if_large(request, to_chat_request, body)
    with field_names.renaming_errors():
        count = await count_prompt_tokens(request, chat)
    return json_response({"input_tokens": count})
