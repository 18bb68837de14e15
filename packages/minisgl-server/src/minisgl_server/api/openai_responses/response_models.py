"""Models of the responses of the Responses API, for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesResponse(BaseModel):
    """Response of ``POST /v1/responses``; it also has fields of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: ResponseUsage | None


class InputItems(BaseModel):
    """Input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """Response of ``DELETE /v1/responses/{response_id}``."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokensResponse(BaseModel):
    """Response of ``POST /v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int
