"""Models of the responses of the Messages API, for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel


class MessageUsage(BaseModel):
    """Token counts of a message."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class MessageResponse(BaseModel):
    """Response of ``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Response of ``POST /v1/messages/count_tokens``."""

    input_tokens: int
