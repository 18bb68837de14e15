"""Outputs that must follow a grammar: compiled beside the loop, advanced by each token, turned into masks.

A grammar takes milliseconds to compile, or a second where somebody means ill, and the first one waits for the provider to read
the tokenizer; so threads do it, and a request waits in the queue meanwhile while others run.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Lock

import numpy as np

from minisgl_core.contracts.grammar import Grammar, GrammarState, Masks, allow_token, clear_tokens, mask_width
from minisgl_core.errors import InvalidValueError, MinisglError, PluginError
from minisgl_core.structured_outputs import GrammarSource

logger = logging.getLogger(__name__)

NUM_KEPT = 256
"""Compiled grammars that are remembered."""
_NUM_THREADS = 2


class Constraint:
    """One request's grammar.

    Attributes:
        error: why its output cannot go on; empty for none.
        param: the field of the request at fault then; None where it is the provider.
        opening: a token that may come next besides what the grammar allows; None for none.
    """

    __slots__ = ("_after_token", "_compiled", "_state", "error", "opening", "param")

    def __init__(self, source: GrammarSource, compiled: Future[GrammarState]) -> None:
        self._compiled, self._after_token, self.opening = compiled, source.after_token, source.free_if_begun_by
        self._state: GrammarState | None = None
        self.error = ""
        self.param: str | None = source.name

    @property
    def is_compiled(self) -> bool:
        """Whether `begin` does not wait."""
        return self._compiled.done()

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called, without an error."""
        return self._state is not None

    def begin(self) -> None:
        """Take the compiled grammar, or its `error`."""
        error = self._compiled.exception()
        if error is None:
            self._state = self._compiled.result().copy()
            return
        if not isinstance(error, MinisglError):
            logger.error("a grammar was not compiled", exc_info=error)
        self.error = str(error) if isinstance(error, MinisglError) else "The grammar cannot be compiled."
        self.param = error.name if isinstance(error, InvalidValueError) else None

    @property
    def active_state(self) -> GrammarState | None:
        """What allows the next token, besides `opening`; None before the token that the grammar begins after."""
        is_free = self._after_token is not None and self.opening is None
        return None if is_free else self._state

    def accept(self, token: int) -> None:
        """Take in the next token."""
        assert self._state is not None
        if self.opening is not None:
            if token != self.opening:
                self._after_token = None
            self.opening = None
        if self._after_token is not None:
            if token == self._after_token:
                self._after_token = None
            return
        is_allowed = self._state.accept(token)
        if self._state.error or not is_allowed:
            self.error = self._state.error or f"The grammar does not allow the token {token}."

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow."""
        state = self.active_state
        return state is not None and state.is_finished


class Grammars:
    """Compiles for one engine, and remembers. `start` and `fill` are called by one thread."""

    def __init__(self, make_provider: Callable[[], Grammar], vocab_size: int) -> None:
        """`make_provider` is called with the first grammar, or by `warm_up`, in a thread."""
        self._make_provider, self._vocab_size = make_provider, vocab_size
        self._made: Grammar | None = None
        self._making = Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._compiled: OrderedDict[tuple[str, str], Future[GrammarState]] = OrderedDict()

    def warm_up(self) -> None:
        """Let the provider read the tokenizer now, in a thread: a second that no request will wait for."""
        self._pool.submit(self._provider)

    def start(self, source: GrammarSource) -> Constraint:
        """Begin to compile, unless the same grammar was met before."""
        key = (source.kind, source.text)
        compiled = self._compiled.pop(key, None)
        if compiled is None or (compiled.done() and compiled.exception() is not None):
            compiled = self._pool.submit(self._compile, source)
        self._compiled[key] = compiled
        if len(self._compiled) > NUM_KEPT:
            self._compiled.popitem(last=False)
        return Constraint(source, compiled)

    def check(self, source: GrammarSource) -> None:
        """Compile now.

        Raises:
            InvalidValueError: the text is not valid for its kind.
            MinisglError: no provider is there, or it cannot read the tokenizer.
        """
        self.start(source)._compiled.result()

    def fill(self, constraints: Sequence[Constraint | None], banned: Sequence[Iterable[int]]) -> Masks:
        """Masks [len(constraints), W] of the tokens that may come next; all may where there is None or nothing yet.

        `banned` tokens are left out, unless no other would be left.
        """
        masks = np.full((len(constraints), mask_width(self._vocab_size)), -1, np.int32)
        places = [place for place, each in enumerate(constraints) if each is not None and each.active_state is not None]
        states = [state for each in constraints if each is not None and (state := each.active_state) is not None]
        if states:
            filled = np.empty((len(states), masks.shape[1]), np.int32)
            self._provider().fill_masks(states, filled)
            masks[places] = filled
            for place in places:
                if (each := constraints[place]) is not None and each.opening is not None:
                    allow_token(masks[place], each.opening)
        for mask, tokens in zip(masks, banned, strict=True):
            before = mask.copy() if tokens else mask
            clear_tokens(mask, tokens)
            if not mask.any():
                mask[:] = before
        return masks

    def _provider(self) -> Grammar:
        with self._making:
            if self._made is None:
                self._made = self._make_provider()
            return self._made

    def _compile(self, source: GrammarSource) -> GrammarState:
        provider = self._provider()
        state = provider.compile(source.kind, source.text, source.name)
        if not isinstance(state, GrammarState):
            raise PluginError(
                f"{type(provider).__qualname__}.compile() must return a GrammarState, and returned {state!r}"
            )
        return state


def wait_for_any(constraints: Iterable[Constraint], timeout_s: float) -> None:
    """Wait until one of them is compiled."""
    wait([each._compiled for each in constraints], timeout_s, return_when=FIRST_COMPLETED)
