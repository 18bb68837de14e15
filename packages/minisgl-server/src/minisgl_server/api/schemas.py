"""The requests that the API takes. Fields that are not listed are refused by name, and none is taken without effect.

Numbers' bounds are those of `SamplingParams`, which checks them. None means the same as a field left out, of any name: clients
send answers back as their own classes have them, with fields that are none here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from minisgl_core.sampling_params import MAX_BAD_WORDS
from minisgl_server.api.limits import Bound
from minisgl_server.api.neutral_fields import NeutralFields
from minisgl_server.api.strict import Int, Strict, TokenId, TokenKey

MAX_TEMPLATE_CHARS = 2**16
"""Of a request's own chat template."""


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Put the usage so far into every chunk.")


class JsonSchema(Strict):
    """A schema by name."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Taken for compatibility; outputs always fit their schema.")


class TaggedStructure(Strict):
    """A JSON value between two texts."""

    begin: str = Field(description="Begins with a trigger.")
    schema_: dict[str, Any] = Field(alias="schema", description="What the value fits.")
    end: str


class ResponseFormat(Strict):
    """OpenAI's way to ask for a form, and SGLang's and vLLM's for structures in free text."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = Field(None, description="Beside the type of that name only.")
    structures: list[TaggedStructure] | None = Field(None, description="Beside the type structural_tag only.")
    triggers: list[str] | None = Field(None, description="Beside the type structural_tag only.")


class StructuredOutputsField(Strict):
    """What the output must be: exactly one of the first six fields. Names are vLLM's."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="JSON that fits this schema.")
    regex: str | None = Field(None, description="A text that this pattern matches, as a whole.")
    choice: list[str] | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(
        None, description="A sentence of this grammar: in Lark's notation, from `start`, or EBNF, from `root`."
    )
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: dict[str, Any] | str | None = Field(
        None, description="Free text, in which each of its `triggers` begins one of its `structures`."
    )
    whitespace_pattern: str | None = Field(None, description="Pattern of the whitespace between parts of the JSON.")
    disable_any_whitespace: bool | None = Field(
        None, description="True for JSON without whitespace, false for a space or an indented new line anywhere."
    )


class SamplingFields(Strict):
    """How to sample, as far as all endpoints call it the same; `SamplingParams` tells more."""

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenKey, float] | None, Bound.VOCABULARY] = None
    allowed_token_ids: Annotated[list[TokenId] | None, Bound.VOCABULARY] = Field(
        None, min_length=1, description="Only these tokens are generated."
    )
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS, description="Texts that are not generated.")
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Bound.VOCABULARY] = None
    include_stop_str_in_output: bool | None = Field(None, description="Return what ended the output, too.")
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class GenerationRequest(SamplingFields, NeutralFields):
    """What chats and completions have in common."""

    model: str | None = Field(None, description="Name of the model; the one served where it is missing.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = Field(None, description="Most tokens to generate.")
    min_tokens: Int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="Older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="Older name of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="Older name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="Older name of structured_outputs.grammar.")
    json_schema: dict[str, Any] | str | None = Field(None, description="SGLang's name of structured_outputs.json.")
    regex: str | None = Field(None, description="SGLang's name of structured_outputs.regex.")
    ebnf: str | None = Field(None, description="SGLang's name of structured_outputs.grammar.")
    whitespace_pattern: str | None = Field(None, description="The same as structured_outputs.whitespace_pattern.")
    guided_whitespace_pattern: str | None = Field(None, description="Older name of whitespace_pattern.")
    disable_any_whitespace: bool | None = Field(
        None, description="The same as structured_outputs.disable_any_whitespace."
    )
    guided_decoding_backend: str | None = Field(None, description="auto, or the server's own provider of grammars.")
    add_special_tokens: bool | None = Field(
        None, description="Begin as the tokenizer does; by default, true for a text and false for a chat's template."
    )
    truncate_prompt_tokens: Int | None = Field(
        None, ge=-1, description="Keep only so many last tokens of the prompt; -1: as many as the context has room for."
    )
    prompt_logprobs: Int | None = Field(
        None, description="Log-probabilities of the prompt's tokens and of so many most likely ones; not in streams."
    )
    return_token_ids: bool | None = Field(None, description="Add the tokens of the prompt and of the output.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name tokens in log-probabilities as token_id:ID instead of by their text."
    )
    priority: Int | None = Field(None, description="Lower runs first; 0 by default.")
    user: str | None = Field(None, description="Shown to the scheduling policy; nothing is recorded.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Share the prefix cache only with requests of the same salt."
    )


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """What was called."""

    name: str
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(Strict):
    """A call that the model made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(None, description="May be missing beside tool_calls only.")
    tool_calls: list[ToolCall] | None = Field(None, description="Of an assistant.")
    reasoning_content: str | None = Field(None, description="Of an assistant; most chat templates leave it out.")
    reasoning: str | None = Field(None, description="Another name for reasoning_content.")
    tool_call_id: str | None = Field(None, description="Of a tool: the call that it answers.")
    name: str | None = Field(None, description="A tool's function, or who speaks; few chat templates use it.")
    annotations: list[Any] | None = Field(None, max_length=0, description="Empty, as in answers of OpenAI's.")


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        None,
        description="Arguments fit the parameters wherever the model calls it, not only where tool_choice demands it.",
    )


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """The tools that the model may call, of all that are given."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Bound.TOOLS] = Field(min_length=1)


class AllowedToolsChoice(Strict):
    """OpenAI's way to narrow the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Int | None = Field(None, description="Most tokens to generate; replaces max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Tool] | None, Bound.TOOLS] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = Field(
        None,
        description="Whether the model may (auto, the default beside tools) or must call a tool, which one, or one of which.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether there may be several calls; true by default.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the model's chat template.")
    chat_template: str | None = Field(
        None, max_length=MAX_TEMPLATE_CHARS, description="Instead of the model's, where the server trusts requests'."
    )
    documents: list[dict[str, Any]] | None = Field(None, description="Documents for the chat template.")
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with what the answer begins after; true by default."
    )
    continue_final_message: bool | None = Field(
        None, description="Have the model continue the last message; not beside add_generation_prompt."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that know it; none turns reasoning off where the template can."
    )
    include_reasoning: bool | None = Field(None, description="Return reasoning content; true by default.")
    separate_reasoning: bool | None = Field(
        None, description="Tell reasoning content from content; true by default, with --reasoning-parser."
    )
    stream_reasoning: Literal[True] | None = Field(None, description="Reasoning content is streamed as it comes.")
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1, description="Text only.")
    verbosity: Literal["medium"] | None = Field(None, description="The default; there is no other.")
    echo: Literal[False] | None = Field(None, description="The last message is not repeated.")


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[str | list[str] | list[TokenId] | list[list[TokenId]], Bound.OUTPUTS] = Field(
        description="A text, token ids, or a list of either; each gives n choices."
    )
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: Int | None = Field(
        None, description="Log-probabilities of the sampled and of so many most likely tokens."
    )
    suffix: Literal[""] | None = Field(None, description="Nothing is inserted.")
