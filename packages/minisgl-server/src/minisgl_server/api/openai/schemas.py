"""Models of the requests of OpenAI's chats and completions. Unknown fields are refused by name.

`SamplingParams` checks the bounds of numbers. A null is the same as a missing field, also for unknown fields: clients send
messages back as their own classes serialize them, with null fields that this API does not have.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from minisgl_core.sampling_params import MAX_BAD_WORDS
from minisgl_server.api.limits import Bound
from minisgl_server.api.strict_model import Int, Metadata, StrictModel, TokenBiases, TokenId

ADD_SPECIAL_TOKENS = "Add tokens such as BOS; true by default for texts only, as chat templates add them."
MAX_TEMPLATE_CHARS = 2**16
"""Maximum length of a request's own chat template."""


class StreamOptions(StrictModel):
    """Options of a streamed response."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Include the usage so far in every chunk.")
    include_obfuscation: Literal[False] | None = Field(None, description="Chunks are not padded.")


class JsonSchema(StrictModel):
    """Named JSON schema."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Accepted; outputs always conform to their schema.")


class TaggedStructure(StrictModel):
    """JSON value between two texts."""

    begin: str = Field(description="Text before the value; it begins with a trigger.")
    schema_: dict[str, Any] = Field(alias="schema", description="JSON schema of the value.")
    end: str


class ResponseFormat(StrictModel):
    """OpenAI's field for structured output; the type structural_tag is SGLang's and vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = Field(None, description="With the type json_schema only.")
    structures: list[TaggedStructure] | None = Field(None, description="With the type structural_tag only.")
    triggers: list[str] | None = Field(None, description="With the type structural_tag only.")


STRUCTURAL_TAG = "Free text in which each of the `triggers` begins one of the `structures`."


class StructuredOutputsField(StrictModel):
    """Structured output by vLLM's names; exactly one of the first six fields is given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="JSON that conforms to this schema.")
    regex: str | None = Field(None, description="Pattern that matches the whole output.")
    choice: list[str] | None = Field(None, description="One of these texts.")
    grammar: str | None = Field(None, description="Lark grammar with the rule `start`, or EBNF with the rule `root`.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: dict[str, Any] | str | None = Field(None, description=STRUCTURAL_TAG)
    whitespace_pattern: str | None = Field(None, description="Pattern of the whitespace in JSON.")
    disable_any_whitespace: bool | None = Field(
        None, description="True for JSON without whitespace; false allows spaces and indented new lines anywhere."
    )


class CommonSamplingFields(StrictModel):
    """Sampling parameters of all OpenAI routes and ``POST /generate``; see `SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[TokenBiases, Bound.VOCABULARY] = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Bound.VOCABULARY] = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class SamplingFields(CommonSamplingFields):
    """Sampling parameters of all routes that can return several outputs."""

    n: Int | None = None
    allowed_token_ids: Annotated[list[TokenId] | None, Bound.VOCABULARY] = Field(
        None, min_length=1, description="Only these tokens are generated."
    )
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS, description="Texts that are not generated.")
    include_stop_str_in_output: bool | None = Field(None, description="Include the stop string or token in the output.")


class NoOpFields(StrictModel):
    """Fields that chats and completions accept without effect. Values that would need an effect are refused.

    `minisgl_server.api.unsupported_fields` has the reasons why other fields are refused.
    """

    safety_identifier: str | None = Field(None, description="Accepted and ignored; nothing is logged.")
    prompt_cache_key: str | None = Field(None, description="Accepted and ignored; the prefix cache matches token ids.")
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = Field(
        None, description="The prefix cache is in memory."
    )
    metadata: Metadata | None = Field(None, description="Accepted; nothing is stored.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier.")
    best_of: Literal[1] | None = Field(None, description="Every output is returned; see n.")
    use_beam_search: Literal[False] | None = Field(None, description="Outputs are sampled.")
    length_penalty: float | None = Field(None, ge=1, le=1, description="A parameter of beam search.")
    early_stopping: Literal[False] | None = Field(None, description="A parameter of beam search.")
    detokenize: Literal[True] | None = Field(None, description="Outputs are always detokenized.")
    spaces_between_special_tokens: bool | None = Field(None, description="Fast tokenizers never add such spaces.")


class SglangStructuredFields(StrictModel):
    """Structured output by SGLang's names."""

    json_schema: dict[str, Any] | str | None = Field(None, description="JSON that conforms to this schema.")
    regex: str | None = Field(None, description="The whole output matches this pattern.")
    ebnf: str | None = Field(None, description="The same as structured_outputs.grammar.")


class GenerationRequest(SamplingFields, SglangStructuredFields, NoOpFields):
    """Fields that chats and completions share."""

    model: str | None = Field(None, description="Name of the served model; may be left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = Field(None, description="Maximum number of tokens to generate.")
    min_tokens: Int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="Deprecated name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="Deprecated name of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(None, description="Deprecated name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="Deprecated name of structured_outputs.grammar.")
    whitespace_pattern: str | None = Field(None, description="The same as structured_outputs.whitespace_pattern.")
    guided_whitespace_pattern: str | None = Field(None, description="Deprecated name of whitespace_pattern.")
    disable_any_whitespace: bool | None = Field(None, description="The same as in structured_outputs.")
    guided_decoding_backend: str | None = Field(None, description="Only auto: --grammar selects the backend.")
    add_special_tokens: bool | None = Field(None, description=ADD_SPECIAL_TOKENS)
    truncate_prompt_tokens: Int | None = Field(
        None,
        ge=-1,
        description="Keep only this many tokens from the end of the prompt; -1 keeps as many as fit the context.",
    )
    prompt_logprobs: Int | None = Field(
        None, description="Number of top log-probabilities per prompt token, beside the token's own; not in streams."
    )
    return_token_ids: bool | None = Field(None, description="Return the token ids of the prompt and the output.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Write tokens in log-probabilities as token_id:ID."
    )
    priority: Int | None = Field(None, description="Lower values run first; 0 by default.")
    user: str | None = Field(None, description="Passed to the scheduling policy; nothing is logged.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Share the prefix cache only with requests of the same salt."
    )


class TextPart(StrictModel):
    """Text part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(StrictModel):
    """Name and arguments of a tool call."""

    name: str
    arguments: str = Field(description="JSON object as a string.")
    parsed_arguments: Any = Field(None, exclude=True, description="As OpenAI's client adds it; ignored.")


class ToolCall(StrictModel):
    """Tool call of the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: Int | None = Field(None, exclude=True, description="As in chunks, which clients join; ignored.")


class ChatMessage(StrictModel):
    """Message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(
        None, description="May be left out only with tool_calls or reasoning content."
    )
    tool_calls: list[ToolCall] | None = Field(None, description="For the role assistant.")
    reasoning_content: str | None = Field(None, description="For the role assistant; most chat templates leave it out.")
    reasoning: str | None = Field(None, description="Alias of reasoning_content.")
    tool_call_id: str | None = Field(None, description="For the role tool: the call that the message answers.")
    name: str | None = Field(None, description="Name of the function or the participant; few chat templates use it.")
    annotations: list[Any] | None = Field(None, max_length=0, description="Must be empty, as in OpenAI's responses.")
    parsed: Any = Field(None, exclude=True, description="As OpenAI's client adds it to structured output; ignored.")
    provider_specific_fields: Any = Field(None, exclude=True, description="As LiteLLM adds it; ignored.")


class Function(StrictModel):
    """Function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        None,
        description="Arguments always conform to the parameters, also where tool_choice does not require the call.",
    )


class FunctionType(StrictModel):
    """Type of a tool; functions are the only kind."""

    type: Literal["function"]


class Tool(FunctionType):
    """Tool that the model may call."""

    function: Function


class FunctionName(StrictModel):
    """Name of a function."""

    name: str


class NamedTool(FunctionType):
    """Tool by its name."""

    function: FunctionName


class AllowedTools(StrictModel):
    """Subset of the tools that the model may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Bound.TOOLS] = Field(min_length=1)


class AllowedToolsChoice(StrictModel):
    """Value of tool_choice that restricts the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Int | None = Field(None, description="Newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Tool] | None, Bound.TOOLS] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = Field(
        None, description="none, auto (the default with tools), required, or the tool or tools that may be called."
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls; true by default.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the chat template.")
    chat_template: str | None = Field(
        None,
        max_length=MAX_TEMPLATE_CHARS,
        description="Replaces the model's chat template, if the server has --trust-request-chat-template.",
    )
    documents: list[dict[str, Any]] | None = Field(None, description="Documents for the chat template.")
    add_generation_prompt: bool | None = Field(None, description="End with the generation prompt; true by default.")
    continue_final_message: bool | None = Field(
        None, description="Have the model continue the last message; not with add_generation_prompt."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates with such a variable; none turns reasoning off if the template can."
    )
    include_reasoning: bool | None = Field(None, description="Return reasoning content; true by default.")
    separate_reasoning: bool | None = Field(
        None, description="Separate reasoning content from content; true by default, with --reasoning-parser."
    )
    stream_reasoning: Literal[True] | None = Field(None, description="Reasoning content is always streamed.")
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1, description="Text only.")
    verbosity: Literal["medium"] | None = Field(None, description="Only the default is supported.")
    echo: Literal[False] | None = Field(None, description="Only false is supported: the last message is not repeated.")


class TranslatedChat(ChatRequest):
    """Chat that a request of another API was translated into. `template_hints` of `Tokenize` replace reasoning_effort."""

    template_hints: dict[str, Any]


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[str | list[str] | list[TokenId] | list[list[TokenId]], Bound.OUTPUTS] = Field(
        description="A text, token ids, or a list of either; each prompt gives n choices."
    )
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: Int | None = Field(None, description="Number of top tokens per position, beside the sampled one.")
    suffix: Literal[""] | None = Field(None, description="Insertion is not supported.")
