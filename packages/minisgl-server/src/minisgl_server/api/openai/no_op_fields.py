"""Request fields that are accepted without effect. Values that would need an effect are refused."""

from typing import Literal

from pydantic import Field

from minisgl_server.api.strict_model import Metadata, StrictModel


class NoOpFields(StrictModel):
    """Fields that chats and completions accept without effect.

    `minisgl_server.api.unsupported_fields` has the reasons why other fields are refused.
    """

    safety_identifier: str | None = Field(None, description="Accepted and ignored; nothing is logged.")
    prompt_cache_key: str | None = Field(None, description="Accepted and ignored; the prefix cache matches token ids.")
    prompt_cache_retention: Literal["in_memory"] | None = Field(None, description="The prefix cache is in memory.")
    metadata: Metadata | None = Field(None, description="Accepted; nothing is stored.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier.")
    best_of: Literal[1] | None = Field(None, description="Every output is returned; see n.")
    use_beam_search: Literal[False] | None = Field(None, description="Outputs are sampled.")
    length_penalty: float | None = Field(None, ge=1, le=1, description="A parameter of beam search.")
    early_stopping: Literal[False] | None = Field(None, description="A parameter of beam search.")
    detokenize: Literal[True] | None = Field(None, description="Outputs are always detokenized.")
    spaces_between_special_tokens: bool | None = Field(
        None, description="Accepted and ignored; fast tokenizers never add such spaces."
    )
