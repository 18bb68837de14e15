"""The seam for grammars: which tokens a structured output allows next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

GrammarSource = Literal["json_object", "json_schema", "regex", "grammar"]


class GrammarState(ABC):
    """One request's progress through a compiled grammar."""

    @abstractmethod
    def mask(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, shape [vocab_size]."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by one token; False where the grammar does not allow it (and the state is unchanged)."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the output may end here."""


class Grammar(ABC):
    """Compiles structured-output requests for one tokenizer."""

    plugin_api: ClassVar[str] = ">=1,<2"

    @abstractmethod
    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: a transformers tokenizer; `vocab_size`: width of the model's logits."""

    @abstractmethod
    def compile(self, source: GrammarSource, text: str) -> GrammarState:
        """Compile `text` (a JSON schema, a pattern, a Lark grammar; empty for json_object).

        Raises:
            InvalidValueError: the text is not valid for its kind.
        """
