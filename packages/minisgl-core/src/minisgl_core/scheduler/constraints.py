"""Constrained decoding: grammars are compiled in threads, advanced by each token, and turned into token masks.

A grammar takes milliseconds to compile, and the grammar backend reads the tokenizer before it compiles the first one. Threads do
this work. A request waits in the queue until its grammar is compiled, and other requests run meanwhile. Before a thread
compiles a grammar, `GrammarChecker` checks it, and refuses it if that takes too much time or memory. A grammar that fails a
quick trial goes to a separate thread, so that it does not delay cheaper ones.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock, RLock

import msgspec
import numpy as np

from minisgl_core.contracts.grammar import GrammarBackend, GrammarState, Masks, allow_token, clear_tokens, mask_width
from minisgl_core.contracts.structured_outputs import GrammarSource
from minisgl_core.errors import InvalidValueError, MinisglError, PluginError, QueueFullError
from minisgl_core.protocol.messages import encode
from minisgl_core.scheduler.grammar_checker import GrammarChecker, QuickLimitError
from minisgl_core.scheduler.token_rules import TokenRules

logger = logging.getLogger(__name__)

MAX_CACHED = 64
"""Maximum number of compiled grammars in the cache. Each of them grows while it is used, with llguidance by up to 30 MB."""
MAX_CACHED_BYTES = 64 * 1024**2
"""Maximum memory of the cached grammars, as `GrammarChecker` measured it."""
MAX_PENDING_CHARS = 32 * 1024**2
"""Maximum number of characters of all texts that wait to be compiled."""
_MIN_BYTES_PER_CHARACTER = 64
"""Lower bound of the memory that a compiled grammar counts for, per character of its text."""
_ACCEPT_LIMIT_S = 0.05
"""CPU time that `accept` may take for one token. Most tokens take microseconds."""
_NUM_THREADS = 2
"""Threads that compile the grammars that pass a quick trial. One more thread compiles the others."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A cached grammar; each request uses a copy of its state."""

    state: GrammarState
    num_bytes: int


class Compilation(Future[CompiledGrammar]):
    """Compilation of one grammar.

    Attributes:
        source: text of the grammar; None once the compilation has ended.
        num_waiting: number of requests that wait for it.
    """

    def __init__(self, source: GrammarSource) -> None:
        super().__init__()
        self.source: GrammarSource | None = source
        self.num_waiting = 0


class Constraint:
    """Grammar state of one request.

    Attributes:
        compilation: future of the compiled grammar; several requests may share it.
        error: the reason why the output cannot continue; empty if there is none.
        param: the request field at fault; None if the grammar backend is at fault.
        reasoning_begin_token: token that begins the reasoning content, while it may still come; None otherwise.
    """

    __slots__ = ("_reasoning_end_token", "_state", "compilation", "error", "param", "reasoning_begin_token")

    def __init__(self, source: GrammarSource, compilation: Compilation) -> None:
        self.compilation, self.reasoning_begin_token = compilation, source.reasoning_begin_token
        self._reasoning_end_token = source.reasoning_end_token
        self._state: GrammarState | None = None
        self.error = ""
        self.param: str | None = source.name

    def stop_waiting(self) -> None:
        """End the request's wait for its grammar. A grammar that no request waits for any more is not compiled."""
        self.compilation.num_waiting -= 1
        if self.compilation.num_waiting <= 0:
            self.compilation.cancel()

    def begin(self) -> None:
        """Copy the state of the compiled grammar, or set `error`."""
        error = self.compilation.exception()
        if error is None:
            self._state = self.compilation.result().state.copy()
            return
        if not isinstance(error, MinisglError):
            logger.error("a grammar could not be compiled", exc_info=error)
        self.error = str(error) if isinstance(error, MinisglError) else "The grammar cannot be compiled."
        self.param = error.name if isinstance(error, InvalidValueError) else None

    @property
    def active_state(self) -> GrammarState | None:
        """The grammar state that restricts the next token; None in the reasoning content, which is unrestricted."""
        is_reasoning = self._reasoning_end_token is not None and self.reasoning_begin_token is None
        return None if is_reasoning else self._state

    def accept(self, token: int) -> None:
        """Advance the state by the next token."""
        assert self._state is not None
        if self.reasoning_begin_token is not None:  # this is the first token, which tells if there is reasoning content
            if token != self.reasoning_begin_token:
                self._reasoning_end_token = None
            self.reasoning_begin_token = None
        if self._reasoning_end_token is not None:
            if token == self._reasoning_end_token:
                self._reasoning_end_token = None
            return
        before = time.thread_time()
        is_allowed = self._state.accept(token)
        if why := self._state.error:
            self.error = f"The output cannot follow the grammar of {self.param} further ({why}). Use a simpler grammar."
        elif not is_allowed:
            self.error = f"The grammar does not allow the token {token}."
        elif time.thread_time() - before > _ACCEPT_LIMIT_S:
            self.error = f"The grammar is too complex: one token took more than {_ACCEPT_LIMIT_S:g} s of CPU time."

    @property
    def is_finished(self) -> bool:
        """True if only the end of the output may follow."""
        state = self.active_state
        return state is not None and state.is_finished


class GrammarManager:
    """Manager of one engine's grammars: it compiles them in threads, caches them, and fills their token masks.

    Call `start` and `fill` from one thread only.
    """

    def __init__(
        self, make_backend: Callable[[], GrammarBackend], vocab_size: int, checker: GrammarChecker | None = None
    ) -> None:
        """Prepare the thread pool. If `checker` is None, texts are compiled without a check of time and memory.

        A thread calls `make_backend` for the first grammar, or earlier for `warm_up`.
        """
        self._make_backend, self._vocab_size, self._checker = make_backend, vocab_size, checker
        self._backend: GrammarBackend | None = None
        self._backend_lock = Lock()
        self._has_warm_up_begun = False
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._slow_pool = ThreadPoolExecutor(1, "slow grammar")
        self._lock = RLock()
        """Lock of the cached and the pending grammars, which the threads change, too."""
        self._cached: OrderedDict[bytes, Compilation] = OrderedDict()
        """Compiled grammars, least recently used first."""
        self._cached_bytes = 0
        self._pending: dict[bytes, Compilation] = {}
        self._pending_chars = 0

    def warm_up(self) -> None:
        """Load the grammar backend in a thread, unless an earlier call did. Call it while no request runs.

        For a vocabulary of 151,936 tokens, it takes 3 to 10 s, and keeps the GIL for up to 2 s of them.
        """
        if not self._has_warm_up_begun:
            self._has_warm_up_begun = True
            self._pool.submit(self._load_backend)

    def close(self) -> None:
        """Cancel the grammars that wait to be compiled, and end the checker's processes."""
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._checker is not None:
            self._checker.close()

    def start(self, source: GrammarSource) -> Constraint:
        """Return the constraint of a new request. Start to compile its grammar, unless it is cached or being compiled.

        If too much text waits to be compiled already, this raises QueueFullError.
        """
        key, num_chars = _key(source), len(source.text) + sum(len(schema) for _, schema in source.parts)
        with self._lock:
            if (compilation := self._cached.get(key)) is not None:
                self._cached.move_to_end(key)
            elif (compilation := self._pending.get(key)) is None:
                if self._pending and self._pending_chars + num_chars > MAX_PENDING_CHARS:
                    raise QueueFullError(f"{len(self._pending)} grammars wait to be compiled already; try again later")
                compilation = self._pending[key] = Compilation(source)
                self._pending_chars += num_chars
                compilation.add_done_callback(lambda _: self._finish(key, num_chars))
                self._pool.submit(self._run, compilation, is_quick=self._checker is not None)
            compilation.num_waiting += 1
        return Constraint(source, compilation)

    def discard(self, constraint: Constraint) -> None:
        """Remove a grammar from the cache after an error of its state.

        The states of one grammar may share what has exceeded a limit, such as llguidance's lexer. Then later ones would fail at
        their first token.
        """
        with self._lock:
            key = next((key for key, each in self._cached.items() if each is constraint.compilation), None)
            if key is not None:
                self._cached_bytes -= self._cached.pop(key).result().num_bytes

    def _finish(self, key: bytes, num_chars: int) -> None:
        """Cache the grammar of an ended compilation if it succeeded, and evict others beyond the cache's limits."""
        with self._lock:
            compilation = self._pending.pop(key)
            compilation.source = None
            self._pending_chars -= num_chars
            if compilation.cancelled() or compilation.exception() is not None:
                return
            self._cached[key] = compilation
            self._cached_bytes += compilation.result().num_bytes
            while len(self._cached) > 1 and (len(self._cached) > MAX_CACHED or self._cached_bytes > MAX_CACHED_BYTES):
                _, evicted = self._cached.popitem(last=False)
                self._cached_bytes -= evicted.result().num_bytes

    def check(self, source: GrammarSource) -> None:
        """Compile a grammar and wait for the result. An error of the text or the grammar backend is raised."""
        constraint = self.start(source)
        try:
            constraint.compilation.result()
        finally:
            constraint.stop_waiting()

    def fill(
        self, constraints: Sequence[Constraint | None], banned: Sequence[Collection[int]], rules: Sequence[TokenRules]
    ) -> Masks:
        """Return masks [len(constraints), W] of the tokens that may come next.

        A constraint that is None, or whose output is in the reasoning content, allows all tokens, or those that `rules` allows.
        The `banned` tokens are cleared afterwards, unless that would leave no token.
        """
        masks = np.full((len(constraints), mask_width(self._vocab_size)), -1, np.int32)
        for mask, rule in zip(masks, rules, strict=True):
            if (allowed := rule.allowed_mask(len(mask))) is not None:
                mask[:] = allowed
        active = [
            (mask, each.reasoning_begin_token, state)
            for mask, each in zip(masks, constraints, strict=True)
            if each is not None and (state := each.active_state) is not None
        ]
        if active:
            filled = np.empty((len(active), masks.shape[1]), np.int32)
            self._load_backend().fill_masks([state for *_, state in active], filled)
            for (mask, begin_token, _), words in zip(active, filled, strict=True):
                mask[:] = words
                if begin_token is not None:
                    allow_token(mask, begin_token)
        for mask, tokens in zip(masks, banned, strict=True):
            before = mask.copy() if tokens else mask
            clear_tokens(mask, tokens)
            if not mask.any():
                mask[:] = before
        return masks

    def _load_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = self._make_backend()
            return self._backend

    def _run(self, compilation: Compilation, is_quick: bool) -> None:
        """Compile a grammar that a request still waits for. If it fails a quick trial, leave it to the slow thread."""
        if (source := compilation.source) is None:
            return
        # The future is marked as running only at the end, because a running future cannot be cancelled.
        try:
            result = self._compile(source, is_quick)
        except QuickLimitError:
            self._slow_pool.submit(self._run, compilation, is_quick=False)
        except BaseException as error:
            if compilation.set_running_or_notify_cancel():
                with self._lock:
                    compilation.set_exception(error)
        else:
            if compilation.set_running_or_notify_cancel():
                # A thread that waits for the result may start the next grammar at once. Under the lock, `_finish` comes first.
                with self._lock:
                    compilation.set_result(result)

    def _compile(self, source: GrammarSource, is_quick: bool) -> CompiledGrammar:
        backend = self._load_backend()
        num_bytes = 0 if self._checker is None else self._checker.check(source, is_quick)
        state = backend.compile(source.kind, source.text, source.name)
        if not isinstance(state, GrammarState):
            raise PluginError(f"compile() of {type(backend)} must return a GrammarState, not {state!r}")
        return CompiledGrammar(state, max(num_bytes, _MIN_BYTES_PER_CHARACTER * len(source.text)))


def _key(source: GrammarSource) -> bytes:
    """Return the key of a grammar in the cache. It has the names and `parts`, since error messages contain them."""
    plain = msgspec.structs.replace(source, reasoning_end_token=None, reasoning_begin_token=None)
    return hashlib.sha256(encode(plain)).digest()
