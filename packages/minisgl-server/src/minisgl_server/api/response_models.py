"""Models of the responses, for the OpenAPI document. Responses are built without them, which takes less time."""

from typing import Any, Literal

from pydantic import BaseModel, RootModel


class ErrorDetails(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Error response."""

    error: ErrorDetails


class AnthropicErrorDetails(BaseModel):
    """Type and message of an error in Anthropic's format."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """Error response of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class Counts(RootModel[dict[str, int]]):
    """Requests that this API worker, its tokenizer workers, the router and the schedulers hold, and locked KV cache pages."""


class Model(BaseModel):
    """Served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    default_sampling: dict[str, float]


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class Message(BaseModel):
    """Generated message; optional fields such as tool_calls are present only if they have a value."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class PromptOutput(BaseModel):
    """Fields with the prompt, if the request asks for them."""

    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class Choice(BaseModel):
    """Fields of a choice of chats and completions."""

    index: int
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletionChoice(Choice):
    """One of n choices."""

    message: Message


class GenerationResponse(BaseModel):
    """Fields of the responses of chats and completions."""

    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletionResponse(GenerationResponse, PromptOutput):
    """Response of ``POST /v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatCompletionChoice]


class CompletionChoice(Choice, PromptOutput):
    """One of n outputs of a prompt."""

    text: str


class CompletionResponse(GenerationResponse):
    """Response of ``POST /v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class GenerateMetaInfo(BaseModel):
    """Metadata of one output of ``POST /generate``; it has log-probabilities only if the request asked for them."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float


class GenerateResponse(BaseModel):
    """One output of ``POST /generate`` so far."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMetaInfo


class GenerateResponses(RootModel[GenerateResponse | list[GenerateResponse]]):
    """Response of ``POST /generate``: a list for several prompts or outputs."""
