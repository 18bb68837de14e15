"""Models of the responses of the Responses API, for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel


class InputTokensDetails(BaseModel):
    """Details of the prompt tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Details of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
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


class ResponseEvent(BaseModel):
    """Event of a streamed response; further fields depend on its type."""

    type: str
    sequence_number: int


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
