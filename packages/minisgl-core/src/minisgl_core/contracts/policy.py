"""The extension point for scheduling policies: which waiting requests are admitted first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol


class RequestView(Protocol):
    """The properties of a request that a policy may look at."""

    @property
    def priority(self) -> int:
        """Lower runs first; 0 by default."""

    @property
    def arrival(self) -> int:
        """A counter that grows with each arrival; a preempted request keeps its own."""

    @property
    def arrival_s(self) -> float:
        """When the request arrived, in ``time.monotonic()``."""

    @property
    def user(self) -> str:
        """The client's name for its user (OpenAI's ``user``); empty where it gave none."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def max_tokens_left(self) -> int:
        """Output tokens that it may still get: its max_tokens, less those that it got already."""


class Policy(ABC):
    """Orders the waiting requests. The scheduler admits from the front while tokens and pages last."""

    plugin_api: ClassVar[str] = ">=2,<3"

    @abstractmethod
    def order(
        self,
        waiting: Sequence[RequestView],
        running: Sequence[RequestView],
        num_cached: Callable[[RequestView], int],
    ) -> Sequence[RequestView]:
        """Return `waiting`, first to admit first.

        The order is a permutation of its input, lower priorities first, and depends on nothing but the arguments.

        Args:
            waiting: by priority, then arrival; a copy.
            running: the requests that have been admitted, oldest admission first; a copy.
            num_cached: returns how many tokens of a request's prompt the prefix cache holds now. Each call costs a match, so ask
                about a request once.
        """
