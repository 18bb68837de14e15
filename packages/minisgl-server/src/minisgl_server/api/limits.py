"""Limits on the size of a request's body and of its parts, derived from the engine's limits."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from minisgl_core.errors import context_length_message
from minisgl_core.protocol.messages import EngineInfo, Tokenize
from minisgl_server.api.errors import ApiError

MIB = 2**20
MAX_BODY_BYTES = 32 * MIB
"""Upper bound of the default of ``--max-body-size``. If a prompt that fills the context needs more, the default is larger."""
BYTES_PER_TOKEN = 32
"""Body size per token of the context: several times what token ids and most texts take."""
MIN_TEXT_CHARS = MIB
"""Lower bound of the limit on text length for any context, since not all texts are prompts."""
MIN_ENTRIES = 2**14
"""Lower bound of the limit on entries per list or object."""
MIN_VALUES = 2**18
"""Lower bound of the limit on values per body; validating so many takes some tenths of a second if all are in small objects."""
MIN_TOOLS = 128
"""Lower bound of the limit on tools, which is OpenAI's own limit."""
TOKENS_PER_TOOL = 8
"""Minimum number of tokens per tool definition: its name and the JSON around it."""


class Bound(enum.Enum):
    """Kind of limit of a list or object field: ``Annotated[list[str], Bound.OUTPUTS]``. The default is `ENTRIES`.

    The value describes the limit in errors.
    """

    ENTRIES = f"the tokens of the context, or {MIN_ENTRIES} if these are fewer"
    CONTEXT = "the tokens of the context"
    OUTPUTS = "the outputs that the server holds at a time"
    VOCABULARY = "the tokens of the vocabulary"
    TOOLS = f"one for each {TOKENS_PER_TOOL} tokens of the context, or {MIN_TOOLS} if these are fewer"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Size limits of requests to one engine.

    Attributes:
        max_entries: maximum number of entries of a list or object, by its `Bound`.
        max_chars: maximum characters of a text; longer texts cannot fit the context.
        max_values: maximum number of values in a body, including the keys of objects.
    """

    max_entries: Mapping[Bound, int]
    max_chars: int
    max_values: int
    max_body_bytes: int

    @classmethod
    def of(cls, info: EngineInfo, max_body_bytes: int | None = None) -> Self:
        """Derive the limits from the engine's. `max_body_bytes` is ``--max-body-size``, None for the default."""
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
        text = max(MIN_TEXT_CHARS, context * info.max_token_bytes) if info.max_token_bytes else max_body_bytes
        # logit_bias may have a key and a value per token of the vocabulary, and allowed_token_ids another value.
        values = max(MIN_VALUES, 4 * context, 3 * info.vocab_size)
        return cls(counts, min(text, max_body_bytes), values, max_body_bytes)

    def check_conversation(self, prompt: Tokenize) -> None:
        """Refuse messages and tools whose texts together cannot fit the context."""
        if prompt.messages is None:
            return
        # Twice, as `num_chars` counts roles and names of fields, too, of which the template may render few.
        if (length := prompt.num_chars) > 2 * self.max_chars:
            what = f"the messages and tools have {length} characters, and no more than {self.max_chars} fit"
            message = context_length_message(self.max_entries[Bound.CONTEXT], what)
            message += " Please reduce the length of the messages."
            raise ApiError(400, message, "messages", "context_length_exceeded")
