"""Contract of scheduling policies, which order the waiting requests."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol


class RequestView(Protocol):
    """Properties of a request that policies may read."""

    @property
    def priority(self) -> int:
        """Priority; lower values run first, 0 by default."""

    @property
    def arrival(self) -> int:
        """Number in order of arrival; a preempted request keeps it."""

    @property
    def arrival_s(self) -> float:
        """Arrival time, by ``time.monotonic()``."""

    @property
    def user(self) -> str:
        """The client's id of its user (OpenAI's ``user``); empty if it gave none."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def max_tokens_left(self) -> int:
        """Output tokens that it may still generate: max_tokens minus those generated already."""


class Policy(ABC):
    """Scheduling policy. The scheduler admits requests from the front of its order while tokens and pages suffice."""

    plugin_api: ClassVar[str] = ">=2,<3"

    @abstractmethod
    def order(
        self, waiting: Sequence[RequestView], running: Sequence[RequestView], num_cached: Callable[[RequestView], int]
    ) -> Sequence[RequestView]:
        """Return `waiting` in the order of admission.

        The result is a permutation of `waiting` with lower priorities first, and depends only on the arguments.

        Args:
            waiting: waiting requests by priority, then arrival; a copy.
            running: admitted requests in order of admission; a copy.
            num_cached: returns how many prompt tokens of a request are in the prefix cache now. Each call looks up the cache, so
                call it once per request.
        """
