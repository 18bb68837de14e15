"""Requests of the Responses API. Fields that are not listed are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from minisgl_server.api.limits import Bound
from minisgl_server.api.schemas import FunctionName
from minisgl_server.api.strict import Int, Strict, TokenId, TokenKey
from minisgl_server.api.unions import by_type

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    """Text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0, description="Empty, as in outputs.")
    logprobs: list[Any] | None = Field(None, description="As in outputs; not read.")


class Refusal(Strict):
    """Text by which a model refused."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[
    Annotated[InputText, Tag("InputText")]
    | Annotated[OutputText, Tag("OutputText")]
    | Annotated[Refusal, Tag("Refusal")],
    by_type(InputText, OutputText, Refusal),
]


class Message(Strict):
    """Message of a conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class Caller(Strict):
    """Caller of a function."""

    type: Literal["direct"]


class FunctionCall(Strict):
    """Call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="A JSON object, as text.")
    id: str | None = None
    status: Status | None = None
    caller: Caller | None = None


class FunctionCallOutput(Strict):
    """Result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    name: str | None = None
    id: str | None = None
    status: Status | None = None
    caller: Caller | None = None


class SummaryText(Strict):
    """Summary of reasoning content."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Strict):
    """Reasoning content."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning that the model did; most chat templates leave it out."""

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: Status | None = None


Item = Annotated[
    Annotated[Message, Tag("Message")]
    | Annotated[FunctionCall, Tag("FunctionCall")]
    | Annotated[FunctionCallOutput, Tag("FunctionCallOutput")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")],
    by_type(Message, FunctionCall, FunctionCallOutput, ReasoningItem, default=Message),
]


class FunctionTool(Strict):
    """Function that the model may call; functions are the only kind of tool."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Arguments fit the parameters wherever the model calls it.")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamedFunction(FunctionName):
    """Function to call, or that may be called."""

    type: Literal["function"]


class AllowedTools(Strict):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Bound.TOOLS] = Field(min_length=1)


class TextFormat(Strict):
    """Form of the output."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="Beside the type json_schema only.")
    description: str | None = Field(None, description="Beside the type json_schema only.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Beside the type json_schema only.")
    strict: bool | None = Field(None, description="Taken for compatibility; outputs always fit their schema.")


class TextConfig(Strict):
    """Settings of the output's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(None, description="The default is the only one.")


class Reasoning(Strict):
    """Settings of reasoning."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None,
        description="The variable reasoning_effort of the chat template, and enable_thinking (false for none), where"
        " the template has them.",
    )
    summary: Literal["auto"] | None = Field(None, description="There are none: items have the whole reasoning content.")
    generate_summary: Literal["auto"] | None = Field(None, description="Older name of summary.")
    context: Literal["auto"] | None = Field(None, description="The chat template decides what it shows.")
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Strict):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = Field(None, description="Events are never padded.")


class PromptFields(Strict):
    """Fields that make up the prompt."""

    model: str | None = Field(None, description="Name of the model; the one served where it is missing.")
    input: str | list[Item] | None = Field(None, description="A user's text, or items.")
    instructions: str | None = Field(None, description="A system message before all others; not passed on.")
    previous_response_id: str | None = Field(None, description="The conversation that this one goes on with.")
    tools: Annotated[list[FunctionTool] | None, Bound.TOOLS] = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; true by default.")
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = Field(None, description="A prompt that does not fit is an error.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the model's chat template.")


class InputTokensRequest(PromptFields):
    """Body of ``POST /v1/responses/input_tokens``."""


class ResponsesRequest(PromptFields):
    """Body of ``POST /v1/responses``."""

    store: bool | None = Field(None, description="Keep the response; true by default.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: Literal[False] | None = Field(None, description="Requests run while their client waits.")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None, description="Reasoning items have their content as text, so that nothing needs to be encrypted."
    )
    max_output_tokens: Int | None = Field(None, description="Most tokens to generate.")
    max_tool_calls: Int | None = Field(None, description="Of built-in tools, which there are none of.")
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = Field(None, description="Beside include of message.output_text.logprobs.")
    metadata: dict[str, str] | None = Field(None, max_length=16, description="Returned as it is.")
    user: str | None = Field(None, description="Taken for compatibility and returned.")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description="Taken for compatibility; there is one tier."
    )
    safety_identifier: str | None = Field(None, description="Taken for compatibility and returned.")
    prompt_cache_key: str | None = Field(None, description="Taken for compatibility and returned.")
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = Field(
        None, description="The only kind of cache."
    )
    top_k: Int | None = None
    min_p: float | None = None
    min_tokens: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenKey, float] | None, Bound.VOCABULARY] = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Bound.VOCABULARY] = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int | None = Field(None, description="Lower runs first; 0 by default.")
