"""The form of every answer, for the OpenAPI document. Answers are made without these classes, which would cost time a chunk."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, RootModel

PromptLogprobs = list[dict[str, dict[str, Any]] | None]
FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetails(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer but a success."""

    error: ErrorDetails


class AnthropicErrorDetails(BaseModel):
    """Type and message of an error in Anthropic's shape."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """Every answer but a success, on Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class Status(BaseModel):
    """A server that is well."""

    status: Literal["ok"]


class Version(BaseModel):
    """The version of the server."""

    version: str


class Counts(RootModel[dict[str, int]]):
    """Requests that each process holds, and locked pages."""


class Model(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """Models."""

    object: Literal["list"]
    data: list[Model]


class PromptDetails(BaseModel):
    """Of a prompt's tokens."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Details of an output's tokens."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Message(BaseModel):
    """What the model says; fields such as tool_calls only where there are some."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    """One of n answers."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunkChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """An event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(BaseModel):
    """One of n outputs of a prompt; in a stream, what is new of it."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(BaseModel):
    """Answer of ``POST /v1/completions``, or an event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenizeAnswer(BaseModel):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    """Answer of ``POST /detokenize``."""

    prompt: str


class GenerateMeta(BaseModel):
    """About one output of ``POST /generate``; log-probabilities only where asked for."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float


class GenerateAnswer(BaseModel):
    """One output of ``POST /generate``, so far."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class GenerateAnswers(RootModel[GenerateAnswer | list[GenerateAnswer]]):
    """Answer of ``POST /generate``: a list for several prompts or outputs."""


class EngineState(BaseModel):
    """Answer of ``GET /engine/state``; what the fields hold is told by `minisgl_core.live_state.State`."""

    engine: dict[str, Any]
    time_s: float
    step: int
    has_text: bool
    num_waiting: int
    num_running: int
    totals: dict[str, int]
    pages: dict[str, Any]
    requests: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    steps: list[dict[str, Any]]
