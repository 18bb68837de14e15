"""The requests that the API takes. Fields that are not listed are refused by name, and none is taken without effect.

Numbers' bounds are those of `SamplingParams`, which checks them. None means the same as a field left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What fits a message."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    """Refuses fields that it does not know, and text where a number belongs."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="Put the usage so far into every chunk.")


class GenerationRequest(Strict):
    """What chats and completions have in common."""

    model: str | None = Field(None, description="Name of the model; the one served where it is missing.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = Field(None, description="Most tokens to generate.")
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int | None = Field(None, description="Lower runs first; 0 by default.")
    user: str | None = Field(None, description="Taken for compatibility; nothing is recorded.")


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Int | None = Field(None, description="Most tokens to generate; replaces max_tokens.")
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables of the model's chat template.")


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="A text, token ids, or a list of either; each gives n choices."
    )
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: Int | None = Field(
        None, description="Log-probabilities of the sampled and of so many most likely tokens."
    )
    add_special_tokens: bool | None = Field(
        None, description="Begin a text prompt as the tokenizer does; true by default."
    )
