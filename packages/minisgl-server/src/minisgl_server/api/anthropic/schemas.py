"""Models of the Messages API: those of requests, which refuse unknown fields by name, and of responses, for OpenAPI."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from minisgl_server.api.limits import Bound
from minisgl_server.api.strict_model import ByType, Caller, Int, StrictModel


class CacheControl(StrictModel):
    """Cache breakpoint; accepted without effect, as every prefix is cached as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheControlled(StrictModel):
    """Base class of models that may have a cache breakpoint."""

    cache_control: CacheControl | None = Field(None, description="Accepted; every prefix is cached anyway.")


class TextBlock(CacheControlled):
    """Text block."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, max_length=0, description="Must be empty.")


class ToolUseBlock(CacheControlled):
    """Tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller | None = None


class ToolResultBlock(CacheControlled):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = Field(None, description="Puts 'Error: ' before the content.")


class ThinkingBlock(StrictModel):
    """Reasoning content of an earlier output; most chat templates leave it out."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="As in responses; not checked.")


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, ByType()]


class MessageParam(StrictModel):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(CacheControlled):
    """Tool that the model may call; client tools are the only kind."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the input.")
    strict: bool | None = Field(None, description="The input always conforms to the schema.")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    eager_input_streaming: bool | None = Field(None, description="Accepted; input is always streamed.")


class ToolChoice(StrictModel):
    """Setting that allows, forbids or requires tool calls, or a call of one tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With the type tool only.")
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """Settings of reasoning: sets the chat template's variable enable_thinking, if it has one."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = Field(None, ge=1, description="With the type enabled; only max_tokens limits outputs.")
    display: Literal["summarized"] | None = Field(None, description="Blocks have the whole reasoning content.")


class OutputFormat(StrictModel):
    """Format of the output."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """Settings of the output."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Sets the chat template's variable reasoning_effort, if it has one."
    )
    format: OutputFormat | None = None


class Metadata(StrictModel):
    """Metadata of the request."""

    user_id: str | None = Field(None, description="Accepted and ignored; nothing is logged.")


class MessagePrompt(CacheControlled):
    """Fields that make up the prompt."""

    model: str = Field(description="Name of the served model.")
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

    max_tokens: Int = Field(ge=1, description="Maximum number of tokens to generate.")
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Accepted; there is one tier.")


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
