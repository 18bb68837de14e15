"""Models of the Responses API: those of requests, which refuse unknown fields by name, and of responses, for OpenAPI."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from minisgl_server.api.limits import Bound
from minisgl_server.api.openai.schemas import CommonSamplingFields, Function, FunctionName, FunctionType
from minisgl_server.api.strict_model import ByType, Caller, Int, Metadata, StrictModel


class InputText(StrictModel):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: str


class OutputText(StrictModel):
    """Text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0, description="Must be empty, as in responses.")
    logprobs: list[Any] | None = Field(None, description="As in responses; ignored.")
    parsed: Any = Field(None, exclude=True, description="As OpenAI's client adds it to structured output; ignored.")


class Refusal(StrictModel):
    """Text of a refusal."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | OutputText | Refusal, ByType()]


class ItemFields(StrictModel):
    """Fields of all items, as responses have them; ignored."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class Message(ItemFields):
    """Message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(ItemFields):
    """Tool call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON object as a string.")
    parsed_arguments: Any = Field(None, exclude=True, description="As OpenAI's client adds it; ignored.")
    caller: Caller | None = None


class FunctionCallOutput(ItemFields):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    name: str | None = None
    caller: Caller | None = None


class SummaryText(StrictModel):
    """Summary of reasoning content."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(StrictModel):
    """Reasoning content."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ItemFields):
    """Reasoning content of an earlier output; most chat templates leave it out."""

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None


Item = Annotated[Message | FunctionCall | FunctionCallOutput | ReasoningItem, ByType()]


class FunctionTool(Function, FunctionType):
    """Function that the model may call. Its type is checked before the fields of a function."""

    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamedFunction(FunctionName, FunctionType):
    """Function by its name, in tool_choice."""


class AllowedTools(StrictModel):
    """Value of tool_choice that restricts the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Bound.TOOLS] = Field(min_length=1)


class TextFormat(StrictModel):
    """Format of the output."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="With the type json_schema only.")
    description: str | None = Field(None, description="With the type json_schema only.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="With the type json_schema only.")
    strict: bool | None = Field(None, description="Accepted; outputs always conform to their schema.")


class TextConfig(StrictModel):
    """Settings of the text output."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(None, description="Only the default is supported.")


class Reasoning(StrictModel):
    """Settings of reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Sets the variables reasoning_effort and enable_thinking of chat templates that have them."
    )
    summary: Literal["auto"] | None = Field(None, description="Accepted; items have the whole reasoning content.")
    generate_summary: Literal["auto"] | None = Field(None, description="Deprecated name of summary.")
    context: Literal["auto"] | None = Field(None, description="Accepted; the chat template decides.")
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(StrictModel):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = Field(None, description="Events are not padded.")


class PromptFields(StrictModel):
    """Fields that make up the prompt."""

    model: str | None = Field(None, description="Name of the served model; may be left out.")
    input: str | list[Item] | None = Field(None, description="Text of the user, or items.")
    instructions: str | None = Field(None, description="System message, which later responses do not inherit.")
    previous_response_id: str | None = Field(None, description="Stored response whose conversation this one continues.")
    tools: Annotated[list[FunctionTool] | None, Bound.TOOLS] = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls; true by default.")
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = Field(None, description="A prompt that is too long is an error.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class StoredQuery(BaseModel, extra="forbid", populate_by_name=True):
    """Query fields of the routes of stored responses. Older FastAPI passes `include` by its name."""

    include: list[Include] = Field(
        [], alias="include[]", description="Accepted; a response has log-probabilities if its request included them."
    )


class RetrieveQuery(StoredQuery):
    """Query of ``GET /v1/responses/{response_id}``."""

    stream: Literal["false"] | None = None


class InputItemsQuery(StoredQuery):
    """Query of ``GET /v1/responses/{response_id}/input_items``."""

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(None, description="Id of an item; only items after it are returned.")


class InputTokensRequest(PromptFields):
    """Body of ``POST /v1/responses/input_tokens``."""


class ResponsesRequest(CommonSamplingFields, PromptFields):
    """Body of ``POST /v1/responses``."""

    store: bool | None = Field(None, description="Store the response; true by default.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: Literal[False] | None = Field(None, description="Clients wait for their responses.")
    include: list[Include] | None = Field(
        None, description="Reasoning items always have their content as text, also with reasoning.encrypted_content."
    )
    max_output_tokens: Int | None = Field(None, description="Maximum number of tokens to generate.")
    max_tool_calls: Int | None = Field(None, description="Accepted; there are no built-in tools to limit.")
    top_logprobs: Int | None = Field(None, description="With include of message.output_text.logprobs only.")
    metadata: Metadata | None = Field(None, description="Returned unchanged.")
    user: str | None = Field(None, description="Passed to the scheduling policy and returned.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="Accepted; there is one tier."
    )
    safety_identifier: str | None = Field(None, description="Accepted and returned.")
    prompt_cache_key: str | None = Field(None, description="Accepted and returned.")
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = Field(
        None, description="Accepted; the prefix cache is in memory."
    )
    min_tokens: Int | None = None
    priority: Int | None = Field(None, description="Lower values run first; 0 by default.")


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
