"""Requests of the Messages API. Fields that are not listed are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from minisgl_server.api.limits import Bound
from minisgl_server.api.strict import Int, Strict
from minisgl_server.api.unions import by_type


class CacheControl(Strict):
    """Taken for compatibility: every prefix is cached as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cached(Strict):
    """Base of what may carry a mark for the cache."""

    cache_control: CacheControl | None = Field(None, description="Taken; every prefix is cached anyway.")


class TextBlock(Cached):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, max_length=0, description="Empty, as in answers.")


class Caller(Strict):
    """Caller of a tool."""

    type: Literal["direct"]


class ToolUseBlock(Cached):
    """Call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller | None = None


class ToolResultBlock(Cached):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = Field(None, description="The model reads 'Error: ' before the content.")


class ThinkingBlock(Strict):
    """Reasoning content of the model; most chat templates leave it out."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="As in answers; not checked.")


Block = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")],
    by_type(TextBlock, ToolUseBlock, ToolResultBlock, ThinkingBlock),
]


class MessageParam(Strict):
    """Turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(Cached):
    """Tool that the model may call; client tools are the only kind."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the input.")
    strict: bool | None = Field(None, description="The input fits the schema wherever the model calls it.")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = Field(None, description="Taken: input is always streamed as it comes.")


class ToolChoice(Strict):
    """Tells if the model may or must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="Beside the type tool only.")
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Settings of reasoning: the variable enable_thinking of the chat template, where it has that."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = Field(None, ge=1, description="Beside the type enabled; max_tokens is what ends it.")
    display: Literal["summarized"] | None = Field(None, description="Blocks have the whole reasoning content.")


class OutputFormat(Strict):
    """Form of the output."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """Settings of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="The variable reasoning_effort of the chat template, where it has that."
    )
    format: OutputFormat | None = None


class Metadata(Strict):
    """Facts about the request."""

    user_id: str | None = Field(None, description="Taken for compatibility; nothing is recorded.")


class MessagePrompt(Cached):
    """Fields that make up the prompt."""

    model: str = Field(description="Name of the model that is served.")
    messages: list[MessageParam] = Field(min_length=1)
    system: str | list[TextBlock] | None = Field(None, description="Blocks are joined by line breaks.")
    tools: Annotated[list[ToolParam] | None, Bound.TOOLS] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    speed: Literal["standard"] | None = None


class CountTokensRequest(MessagePrompt):
    """Body of ``POST /v1/messages/count_tokens``."""


class MessagesRequest(MessagePrompt):
    """Body of ``POST /v1/messages``."""

    max_tokens: Int = Field(ge=1, description="Most tokens to generate.")
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(
        None, description="Taken for compatibility; there is one tier."
    )
