"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's form."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from minisgl_core.errors import InvalidValueError
from minisgl_core.logs import REQUEST_ID
from minisgl_core.messages import Detokenize, Tokenize, ToolUse
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.answers import DetokenizeAnswer, TokenizeAnswer
from minisgl_server.api.choices import check_model, json_response, parse, served_model
from minisgl_server.api.limits import Bound, RequestLimits
from minisgl_server.api.openapi import documented
from minisgl_server.api.schemas import ChatMessage, Tool
from minisgl_server.api.strict import Strict, TokenId
from minisgl_server.api.tools import described

router = APIRouter()

_numbers = itertools.count(1)


class TokenizeRequest(Strict):
    """Body of ``POST /tokenize``: exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None,
        description="Begin as the tokenizer does; by default, true for a prompt and false for messages, whose template"
        " does that itself.",
    )
    return_token_strs: bool | None = Field(None, description="Tell each token as the vocabulary writes it, too.")
    add_generation_prompt: bool | None = Field(
        None, description="Beside messages only: end with what the model's answer begins after; true by default."
    )
    tools: Annotated[list[Tool] | None, Bound.TOOLS] = Field(None, min_length=1, description="Beside messages only.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Beside messages only: variables of the model's chat template."
    )


class DetokenizeRequest(Strict):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


@router.post("/tokenize", **documented(TokenizeRequest, TokenizeAnswer, errors=(400, 404)))
async def tokenize(request: Request) -> Response:
    """The tokens of a prompt or of a conversation, as a completion or a chat would begin with them."""
    info, served = served_model(request.app)
    asked = await parse(TokenizeRequest, request)
    check_model(asked.model, served)
    if (asked.prompt is None) == (asked.messages is None):
        given = "both" if asked.prompt is not None else "neither"
        raise InvalidValueError("prompt", given, "given, or messages is, and not both")
    for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
        if asked.messages is None and getattr(asked, name) is not None:
            raise InvalidValueError(name, "given", "left out unless messages are given")
    message = Tokenize(
        request_id=new_tokens_id(),
        sampling=SamplingParams(),
        text=asked.prompt,
        messages=None if asked.messages is None else [each.model_dump(exclude_none=True) for each in asked.messages],
        add_special_tokens=asked.add_special_tokens,
        add_generation_prompt=asked.add_generation_prompt is not False,
        chat_template_kwargs=asked.chat_template_kwargs or {},
        tools=None if asked.tools is None else ToolUse(tools=described(asked.tools)),
        only_tokens=True,
    )
    RequestLimits.of(info).check_conversation(message)
    tokens = await request.app.state.client.ask(message)
    return json_response(
        {
            "count": len(tokens.token_ids),
            "max_model_len": info.max_seq_len,
            "tokens": tokens.token_ids,
            "token_strs": tokens.token_names if asked.return_token_strs else None,
        }
    )


@router.post("/detokenize", **documented(DetokenizeRequest, DetokenizeAnswer, errors=(400, 404)))
async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones included."""
    _, served = served_model(request.app)
    asked = await parse(DetokenizeRequest, request)
    check_model(asked.model, served)
    tokens = await request.app.state.client.ask(Detokenize(new_tokens_id(), asked.tokens))
    return json_response({"prompt": tokens.text})


def new_tokens_id() -> str:
    """Return an id for a question to a tokenizer worker."""
    return f"tokens-{REQUEST_ID.get()}-{next(_numbers):x}"
