"""The seam for scheduling policies: which waiting requests are considered first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol


class Waiting(Protocol):
    """What a policy sees of a waiting request."""

    @property
    def priority(self) -> int:
        """Lower runs first; 0 by default."""

    @property
    def arrival(self) -> int:
        """A counter that grows with each arrival; a preempted request keeps its own."""

    @property
    def max_tokens_left(self) -> int:
        """Output tokens that it may still get: its max_tokens, less those that it got before it was preempted."""


class Policy(ABC):
    """Orders the waiting requests. The scheduler admits from the front while tokens and pages last."""

    plugin_api: ClassVar[str] = ">=1,<2"

    @abstractmethod
    def order(self, waiting: Sequence[Waiting], num_cached: Callable[[Waiting], int]) -> Sequence[Waiting]:
        """Return `waiting`, first to admit first.

        The order is a permutation of its input, lower priorities first, and depends on nothing but the arguments.

        Args:
            waiting: by priority, then arrival; a copy.
            num_cached: tokens of a request's prompt that the prefix cache holds now; costs a cache match a call, so a request
                is asked about once.
        """
