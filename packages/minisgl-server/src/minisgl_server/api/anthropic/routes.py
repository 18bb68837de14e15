"""``/v1/messages``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from minisgl_core.logs import REQUEST_ID
from minisgl_server.api.anthropic.answers import MessageAnswer, MessageEvent, TokenCount
from minisgl_server.api.anthropic.events import MessageBody, MessageEvents
from minisgl_server.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from minisgl_server.api.anthropic.translate import chat_of, template_hints
from minisgl_server.api.chat import count_prompt_tokens, run_chat
from minisgl_server.api.choices import json_response, parse, served_model
from minisgl_server.api.openapi import documented
from minisgl_server.api.streaming import EventStream

router = APIRouter()


@router.post(
    "/v1/messages",
    **documented(MessagesRequest, MessageAnswer, streams=MessageEvent, ends_with_done=False, errors=(400, 404)),
)
async def messages(request: Request) -> Response:
    """Answer a conversation with content blocks."""
    _, model = served_model(request.app)
    asked = await parse(MessagesRequest, request)
    chat, names = chat_of(asked)
    with names.errors():
        run = await run_chat(request, chat, "msg", template_hints(asked))
    message = MessageBody(model, run.choices)
    if asked.stream:
        response: Response = EventStream(*run, MessageEvents(message))
    else:
        await run.collect(lambda _, text: message.segments.push(text))
        response = json_response(message.finished())
    return _named(response)


@router.post("/v1/messages/count_tokens", **documented(CountTokensRequest, TokenCount, errors=(400, 404)))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a message would begin with."""
    served_model(request.app)
    asked = await parse(CountTokensRequest, request)
    chat, names = chat_of(asked)
    with names.errors():
        count = await count_prompt_tokens(request, chat, template_hints(asked))
    return _named(json_response({"input_tokens": count}))


def _named(response: Response) -> Response:
    """Add the header in which Anthropic's client looks for the request's id."""
    response.headers["request-id"] = REQUEST_ID.get()
    return response
