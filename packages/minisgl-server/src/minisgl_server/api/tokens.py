"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's form."""

from __future__ import annotations

import itertools
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from minisgl_core.errors import InvalidValueError
from minisgl_core.logs import REQUEST_ID
from minisgl_core.messages import Detokenize, Tokenize
from minisgl_core.sampling_params import SamplingParams
from minisgl_server.api.answers import DetokenizeAnswer, TokenizeAnswer
from minisgl_server.api.choices import check_model, json_response, parse, served_model
from minisgl_server.api.openapi import documented
from minisgl_server.api.schemas import ChatMessage, Strict, TokenId

router = APIRouter()

_numbers = itertools.count(1)


class TokenizeRequest(Strict):
    """Body of ``POST /tokenize``: exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="Begin a prompt as the tokenizer does; true by default. A chat's template does that itself."
    )
    return_token_strs: bool | None = Field(None, description="Tell each token as the vocabulary writes it, too.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the model's chat template.")


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
    if asked.messages is not None and asked.add_special_tokens:
        raise InvalidValueError("add_special_tokens", True, "false for messages", "The chat template writes them.")
    message = Tokenize(
        request_id=_new_id(),
        sampling=SamplingParams(),
        text=asked.prompt,
        messages=None if asked.messages is None else [each.model_dump(exclude_none=True) for each in asked.messages],
        add_special_tokens=asked.add_special_tokens is not False,
        chat_template_kwargs=asked.chat_template_kwargs or {},
        only_tokens=True,
    )
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
    tokens = await request.app.state.client.ask(Detokenize(_new_id(), asked.tokens))
    return json_response({"prompt": tokens.text})


def _new_id() -> str:
    return f"tokens-{REQUEST_ID.get()}-{next(_numbers):x}"
