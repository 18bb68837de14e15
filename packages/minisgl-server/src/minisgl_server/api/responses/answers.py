"""Answers of the Responses API, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel


class InputTokensDetails(BaseModel):
    """Details of the tokens of a prompt."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Details of the tokens of an output."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(BaseModel):
    """Answer of ``POST /v1/responses``; it has the request's fields besides."""

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
    """Answer of ``DELETE /v1/responses/{response_id}``."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class StoredAnswer(RootModel[ResponseAnswer | DeletedResponse]):
    """Answer of ``GET`` or of ``DELETE /v1/responses/{response_id}``."""


class InputTokens(BaseModel):
    """Answer of ``POST /v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int
