"""Sizes of requests: how large a body and each of its parts may be. All follow from the engine's limits."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from fastapi import FastAPI

from minisgl_core.errors import beyond_context
from minisgl_core.messages import EngineInfo, Tokenize
from minisgl_server.api.errors import ApiError

MIB = 2**20
MAX_BODY_BYTES = 32 * MIB
"""Largest default of ``--max-body-size``, unless one prompt of the model's context needs more."""
BYTES_PER_TOKEN = 32
"""Room in a body for each token of the context: several times what token ids and most texts take."""
MIN_TEXT = MIB
"""Every text may have as many characters, however short the context is: some texts are no prompts."""
MIN_ENTRIES = 2**14
"""The same for lists and objects."""
MIN_VALUES = 2**18
"""Decoding and validating so many values takes about 20 ms."""
MIN_TOOLS = 128
"""OpenAI's own limit."""
TOKENS_PER_TOOL = 8
"""A tool's name and the punctuation of its description take more."""


class Bound(enum.Enum):
    """Limit of a list or an object: ``Annotated[list[str], Bound.OUTPUTS]``. Fields without one have `ENTRIES`."""

    ENTRIES = "the tokens of the context, or 16384 where these are fewer"
    CONTEXT = "the tokens of the context"
    OUTPUTS = "the outputs that the server holds at a time"
    VOCABULARY = "the tokens of the vocabulary"
    TOOLS = "one for each 8 tokens of the context, or 128 where these are fewer"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one engine.

    Attributes:
        counts: most entries of a list or an object, by its `Bound`.
        text: most characters of a text; no more fit the context.
        values: most values in a body, keys of objects included.
        body_bytes: largest body, decompressed.
    """

    counts: Mapping[Bound, int]
    text: int
    values: int
    body_bytes: int

    @classmethod
    def of(cls, info: EngineInfo, max_body_bytes: int | None = None) -> Self:
        """Derive the limits from an engine's; `max_body_bytes`: ``--max-body-size``, None for the default."""
        context, per_prompt = info.max_seq_len, BYTES_PER_TOKEN * info.max_seq_len
        if max_body_bytes is None:
            max_body_bytes = max(min(MAX_BODY_BYTES, MIB + info.max_requests * per_prompt), MIB + per_prompt)
        counts = {
            Bound.ENTRIES: max(MIN_ENTRIES, context),
            Bound.CONTEXT: context,
            Bound.OUTPUTS: info.max_requests,
            Bound.VOCABULARY: info.vocab_size,
            Bound.TOOLS: max(MIN_TOOLS, context // TOKENS_PER_TOOL),
        }
        text = max(MIN_TEXT, context * info.max_token_bytes) if info.max_token_bytes else max_body_bytes
        values = max(MIN_VALUES, 4 * context, 3 * info.vocab_size)
        return cls(counts, min(text, max_body_bytes), values, max_body_bytes)

    def check_conversation(self, prompt: Tokenize) -> None:
        """Refuse messages and tools whose texts together are longer than any that fits the context.

        Raises:
            ApiError: 400, they are too long.
        """
        if prompt.messages is None:
            return
        if (length := prompt.num_chars) > 2 * self.text:  # roles and types count, too, and not all of them are rendered
            what = f"the messages and tools have {length} characters, and no more than {self.text} fit"
            message = f"{beyond_context(self.counts[Bound.CONTEXT], what)} Please reduce the length of the messages."
            raise ApiError(400, message, "messages", "context_length_exceeded")


def limits_of(app: FastAPI) -> RequestLimits | None:
    """Limits of an application's engine; None while it starts."""
    info = app.state.client.info
    return None if info is None else RequestLimits.of(info, app.state.max_body_size)
