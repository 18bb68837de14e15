"""Routes of the Messages API, below ``/v1/messages``."""

from fastapi import APIRouter, Request, Response

from minisgl_core.utils.logs import REQUEST_ID
from minisgl_server.api.anthropic.events import MessageEvents, MessageObject
from minisgl_server.api.anthropic.schemas import CountTokensRequest, MessageResponse, MessagesRequest, TokenCount
from minisgl_server.api.anthropic.translate import to_chat_request
from minisgl_server.api.errors import ANTHROPIC_ID_HEADER
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
    message = MessageObject(model, choices)
    if body.stream:
        response: Response = EventStreamResponse(choices, MessageEvents(message))
    else:
        await choices.collect(lambda _, text: message.segments.push(text))
        response = json_response(message.finished())
    return _with_request_id(response)


@router.post("/v1/messages/count_tokens", **route_docs(TokenCount, CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt of a message, without generating it."""
    body = await parse_request(CountTokensRequest, request)
    chat, field_names = await run_in_thread_if_large(request, to_chat_request, body)
    with field_names.renaming_errors():
        count = await count_prompt_tokens(request, chat)
    return _with_request_id(json_response({"input_tokens": count}))


def _with_request_id(response: Response) -> Response:
    """Add the header that Anthropic's client reads."""
    response.headers[ANTHROPIC_ID_HEADER] = REQUEST_ID.get()
    return response
