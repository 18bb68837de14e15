"""Outputs that must follow a grammar: compiled beside the loop, advanced by each token, turned into masks.

A grammar takes milliseconds to compile, and the first one waits for the provider to read the tokenizer. So threads do it, and
a request waits in the queue meanwhile while others run. What takes longer is found by `GrammarGuard` first.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock

import numpy as np

from minisgl_core.contracts.grammar import Grammar, GrammarState, Masks, allow_token, clear_tokens, mask_width
from minisgl_core.errors import InvalidValueError, MinisglError, PluginError, QueueFullError
from minisgl_core.scheduler.grammar_guard import GrammarGuard
from minisgl_core.scheduler.token_rules import TokenRules
from minisgl_core.structured_outputs import GrammarSource

logger = logging.getLogger(__name__)

NUM_KEPT = 256
"""Compiled grammars that are remembered."""
MAX_KEPT_BYTES = 64 * 1024**2
"""Memory that the remembered ones may take, as `GrammarGuard` measured it."""
MAX_PENDING_BYTES = 32 * 1024**2
"""Length of the texts that wait to be compiled."""
_MIN_BYTES_PER_CHARACTER = 64
"""A compiled grammar weighs at least so much."""
_ACCEPT_LIMIT_S = 0.05
"""Processor time that one token may take, where most take microseconds."""
_NUM_THREADS = 2


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that is remembered; requests use copies of its state."""

    state: GrammarState
    num_bytes: int


class Constraint:
    """One request's grammar.

    Attributes:
        error: why its output cannot go on; empty for none.
        param: the field of the request at fault then; None where it is the provider.
        opening: a token that may come next besides what the grammar allows; None for none.
    """

    __slots__ = ("_after_token", "_compiled", "_state", "error", "opening", "param")

    def __init__(self, source: GrammarSource, compiled: Future[CompiledGrammar]) -> None:
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
            self._state = self._compiled.result().state.copy()
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
        before = time.thread_time()
        is_allowed = self._state.accept(token)
        if self._state.error or not is_allowed:
            self.error = self._state.error or f"The grammar does not allow the token {token}."
        elif time.thread_time() - before > _ACCEPT_LIMIT_S:
            self.error = f"The grammar got too complex: a token took more than {_ACCEPT_LIMIT_S:g} s."

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end may follow."""
        state = self.active_state
        return state is not None and state.is_finished


class Grammars:
    """Compiles for one engine, and remembers. `start` and `fill` are called by one thread."""

    def __init__(
        self, make_provider: Callable[[], Grammar], vocab_size: int, guard: GrammarGuard | None = None
    ) -> None:
        """Without a guard, texts are compiled unseen.

        `make_provider` is called with the first grammar, or by `warm_up`, in a thread.
        """
        self._make_provider, self._vocab_size, self._guard = make_provider, vocab_size, guard
        self._made: Grammar | None = None
        self._making = Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._compiled: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        self._pending: dict[bytes, int] = {}

    def warm_up(self) -> None:
        """Let the provider read the tokenizer now, in a thread: a second that no request will wait for."""
        self._pool.submit(self._provider)

    def close(self) -> None:
        """Drop what waits to be compiled and end the guard's process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._guard is not None:
            self._guard.close()

    @property
    def num_kept(self) -> int:
        """Grammars that are remembered or being compiled."""
        return len(self._compiled)

    def start(self, source: GrammarSource) -> Constraint:
        """Begin to compile, unless the same grammar was met before. One that does not compile is forgotten.

        Raises:
            QueueFullError: too much text waits to be compiled.
        """
        key = hashlib.sha256(f"{source.kind}\0{source.text}".encode()).digest()
        compiled = self._compiled.get(key)
        if compiled is None:
            size = len(source.text) + sum(len(schema) for _, schema in source.parts)
            if self._pending and sum(list(self._pending.values())) + size > MAX_PENDING_BYTES:
                raise QueueFullError(f"{len(self._pending)} grammars wait to be compiled already; try again later")
            self._pending[key] = size
            compiled = self._compiled[key] = self._pool.submit(self._compile, source)
            compiled.add_done_callback(lambda done: self._finish(key, done))
        else:
            self._compiled.move_to_end(key)
        self._trim()
        return Constraint(source, compiled)

    def _finish(self, key: bytes, compiled: Future[CompiledGrammar]) -> None:
        self._pending.pop(key, None)
        if compiled.cancelled() or compiled.exception() is not None:
            self._compiled.pop(key, None)

    def _trim(self) -> None:
        """Forget the oldest where there are too many."""
        done = [each.result() for each in list(self._compiled.values()) if each.done() and not each.exception()]
        num_bytes = sum(each.num_bytes for each in done)
        for key, each in list(self._compiled.items()):
            if len(self._compiled) <= NUM_KEPT and num_bytes <= MAX_KEPT_BYTES:
                return
            if each.done() and self._compiled.pop(key, None) is not None and not each.exception():
                num_bytes -= each.result().num_bytes

    def check(self, source: GrammarSource) -> None:
        """Compile now.

        Raises:
            InvalidValueError: the text is not valid for its kind.
            MinisglError: no provider is there, or it cannot read the tokenizer.
        """
        self.start(source)._compiled.result()

    def fill(
        self,
        constraints: Sequence[Constraint | None],
        banned: Sequence[Iterable[int]],
        rules: Sequence[TokenRules | None] = (),
    ) -> Masks:
        """Masks [len(constraints), W] of the tokens that may come next; all may where there is None or nothing yet.

        Where there is no grammar, those that `rules` allow may. `banned` tokens are left out, unless no other would be left.
        """
        masks = np.full((len(constraints), mask_width(self._vocab_size)), -1, np.int32)
        for mask, rule in zip(masks, rules, strict=False):
            if rule is not None and (allowed := rule.allowed_mask(len(mask))) is not None:
                mask[:] = allowed
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

    def _compile(self, source: GrammarSource) -> CompiledGrammar:
        provider, num_bytes = self._provider(), 0
        if self._guard is not None:
            for name, schema in source.parts:
                self._guard.check("json_schema", schema, name)
            num_bytes = self._guard.check(source.kind, source.text, source.name)
        state = provider.compile(source.kind, source.text, source.name)
        if not isinstance(state, GrammarState):
            raise PluginError(
                f"{type(provider).__qualname__}.compile() must return a GrammarState, and returned {state!r}"
            )
        return CompiledGrammar(state, max(num_bytes, _MIN_BYTES_PER_CHARACTER * len(source.text)))


def wait_for_any(constraints: Iterable[Constraint], timeout_s: float) -> None:
    """Wait until one of them is compiled."""
    wait([each._compiled for each in constraints], timeout_s, return_when=FIRST_COMPLETED)
