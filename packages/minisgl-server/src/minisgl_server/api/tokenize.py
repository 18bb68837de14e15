"""Routes ``POST /tokenize`` and ``POST /detokenize``, as in vLLM."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, create_model

from minisgl_core.errors import InvalidValueError, Summary
from minisgl_core.protocol.messages import Detokenize, Tokenize, ToolUse
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.limits import Bound, RequestLimits
from minisgl_server.api.openai.requests import (
    json_response,
    new_request_id,
    parse_request,
    request_limits,
    run_in_thread_if_large,
    served_model,
)
from minisgl_server.api.openai.schemas import ADD_SPECIAL_TOKENS, ChatMessage, Tool
from minisgl_server.api.openai.tools import tool_dicts
from minisgl_server.api.openapi import route_docs
from minisgl_server.api.strict_model import StrictModel, TokenId

router = APIRouter()

_Detokenized = create_model("DetokenizeResponse", prompt=str)
_Tokenized = create_model(
    "TokenizeResponse", count=int, max_model_len=int, tokens=list[int], token_strs=list[str] | None
)


class TokenizeRequest(StrictModel):
    """Body of ``POST /tokenize``: exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(None, description=ADD_SPECIAL_TOKENS)
    return_token_strs: bool | None = Field(None, description="Also return each token as the vocabulary writes it.")
    add_generation_prompt: bool | None = Field(
        None, description="With messages only: end with the generation prompt of the chat template; true by default."
    )
    tools: Annotated[list[Tool] | None, Bound.TOOLS] = Field(None, min_length=1, description="With messages only.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="With messages only: template variables.")


class DetokenizeRequest(StrictModel):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


@router.post("/tokenize", **route_docs(_Tokenized, TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt or of messages, as completions and chats use them."""
    info, _ = served_model(request.app)
    body = await parse_request(TokenizeRequest, request)
    if (body.prompt is None) == (body.messages is None):
        given = None if body.prompt is None else Summary("prompt, messages")
        raise InvalidValueError("prompt", given, "exactly one of prompt and messages")
    for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
        if body.messages is None and getattr(body, name) is not None:
            value = body.model_dump(include={name}, exclude_none=True)[name]
            raise InvalidValueError(name, value, "left out unless messages are given")
    message = await run_in_thread_if_large(request, _query, body, request_limits(request.app))
    tokens = await request.app.state.client.query(message, request.receive)
    return json_response(
        {
            "count": len(tokens.token_ids),
            "max_model_len": info.max_seq_len,
            "tokens": tokens.token_ids,
            "token_strs": tokens.token_names if body.return_token_strs else None,
        }
    )


def _query(body: TokenizeRequest, limits: RequestLimits) -> Tokenize:
    """Return the message to a tokenizer worker."""
    message = Tokenize(
        request_id=new_request_id("tokens"),
        sampling=SamplingParams(),
        text=body.prompt,
        messages=None if body.messages is None else [each.model_dump(exclude_none=True) for each in body.messages],
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt is not False,
        chat_template_kwargs=body.chat_template_kwargs or {},
        tools=None if body.tools is None else ToolUse(tools=tool_dicts(body.tools)),
        only_tokens=True,
    )
    limits.check_conversation(message)
    return message


@router.post("/detokenize", **route_docs(_Detokenized, DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    body = await parse_request(DetokenizeRequest, request)
    tokens = await request.app.state.client.query(Detokenize(new_request_id("tokens"), body.tokens), request.receive)
    return json_response({"prompt": tokens.text})
