"""Order in which a tokenizer worker handles its messages."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any

from minisgl_core.protocol.messages import Abort, Detokenize, RequestCounts, Stop, Tokenize
from minisgl_core.runtime.ipc import Receiver

if TYPE_CHECKING:
    from minisgl_server.tokenizer.prompt_encoder import EncodedPrompt
    from minisgl_server.tokenizer.worker import TokenizerWorker

_BACKGROUND_CHARS = 50_000
"""Prompts of more characters are tokenized on a thread."""
_S_PER_CHAR = 2e-6
"""Seconds to tokenize a character."""
_CHARS_PER_MESSAGE = 50
"""Characters that take as long to tokenize as the chat template takes per message."""
_SLOW_S = 1.0
"""CPU time for a short chat above which the chat template is slow. Wall time would count a stalled CPU, too."""
_SLOW_TEMPLATE_S = 600.0
"""Time for which all chats are rendered on a thread after the template was slow."""
_POLL_S = 0.005
"""Interval at which the result of the thread is polled."""
_MAX_SKIPS = 16
"""Messages that may be handled ahead of the first waiting prompt."""


class TokenizerQueue:
    """Queue of the messages to one tokenizer worker.

    Tokenizing a long prompt takes seconds, and other requests must not wait for it. Long prompts are therefore tokenized on a
    thread, one at a time, and short ones pass them meanwhile. The next long prompt is the one that would be done first if each
    had been started at its arrival. So shorter ones pass it, but not forever. Output and aborts are handled first, but at most
    `_MAX_SKIPS` of them before the next prompt. A prompt that is aborted while it waits is dropped at once. Chats count as long
    prompts if they have a template of their own, or the model's has been slow lately.
    """

    def __init__(self, worker: TokenizerWorker) -> None:
        self._worker = worker
        self._quick: dict[int, Tokenize | Detokenize | RequestCounts] = {}
        """Waiting messages that are handled in this thread, by number, oldest first."""
        self._slow: dict[int, tuple[float, Tokenize]] = {}
        """Waiting prompts that are tokenized on the other thread, by number, oldest first. Each has the time at which it would be
        done if it had been started at its arrival, in seconds of `time.monotonic`."""
        self._numbers = count()
        self._waiting_ids: dict[str, int] = {}
        """Request ids of the waiting prompts and of the prompt on the thread, with the number of each."""
        self._aborted_ids: set[str] = set()
        """Those of `_waiting_ids` that were aborted."""
        self._num_skips = 0
        """Messages that were handled ahead of the first waiting one."""
        self._in_background: tuple[Tokenize, Future[EncodedPrompt]] | None = None
        """Prompt on the thread, and its future result."""
        self._slow_template_until_s = 0.0

    def run(self, receiver: Receiver[Any]) -> None:
        """Receive and handle messages until `Stop`."""
        while True:
            if self._next() is not None:
                timeout_s: float | None = 0
            else:
                timeout_s = None if self._in_background is None else _POLL_S  # None waits without a limit
            message = receiver.receive(timeout_s)
            if isinstance(message, Stop):
                return
            if message is not None:
                self.add(message)
            if message is None or self._num_skips >= _MAX_SKIPS:
                self.run_next()

    def add(self, message: Any) -> None:
        """Handle a message at once, or queue it. A `RequestCounts` is queued, as it must follow everything sent before it."""
        match message:
            case Detokenize() | RequestCounts():
                self._quick[next(self._numbers)] = message
            case Tokenize():
                number = next(self._numbers)
                self._waiting_ids |= dict.fromkeys(message.output_ids, number)
                num_chars = message.num_chars + _CHARS_PER_MESSAGE * len(message.messages or ())
                is_template_slow = message.messages is not None and time.monotonic() < self._slow_template_until_s
                if num_chars > _BACKGROUND_CHARS or message.chat_template is not None or is_template_slow:
                    self._slow[number] = time.monotonic() + num_chars * _S_PER_CHAR, message
                else:
                    self._quick[number] = message
            case Abort(request_id) if request_id in self._waiting_ids:
                self._abort(request_id)
            case _:
                self._num_skips += bool(self._quick or self._slow)
                self._worker.handle(message)

    def run_next(self) -> None:
        """Handle the prompt that the thread has tokenized, or else the next waiting message.

        If that is a long prompt, a thread is started, which tokenizes the one of them that is due first.
        """
        self._num_skips = 0
        if self._in_background is not None and self._in_background[1].done():
            (message, encoded), self._in_background = self._in_background, None
            self._handle_prompt(message, encoded)
        elif (number := self._next()) is not None:
            if number in self._slow:
                _, prompt = self._slow.pop(min(self._slow, key=lambda each: self._slow[each][0]))
                self._in_background = prompt, self._encode_in_background(prompt)
            elif isinstance(quick := self._quick.pop(number), Tokenize):
                self._handle_prompt(quick, None)
            else:
                self._worker.handle(quick)

    def _next(self) -> int | None:
        """Return the number of the next message to handle; None if there is none or all wait for the thread.

        While the thread is busy, only messages of `_quick` are handled, and no `RequestCounts`: it must follow older prompts.
        """
        if self._in_background is None:
            return min(chain(islice(self._quick, 1), islice(self._slow, 1)), default=None)
        return next((number for number, message in self._quick.items() if not isinstance(message, RequestCounts)), None)

    def _abort(self, request_id: str) -> None:
        """Abort a waiting prompt; drop its message when all of its outputs are aborted, unless the thread tokenizes it."""
        self._aborted_ids.add(request_id)
        number = self._waiting_ids[request_id]
        waiting = self._slow[number][1] if number in self._slow else self._quick.get(number)
        if isinstance(waiting, Tokenize) and self._aborted_ids.issuperset(waiting.output_ids):
            self._slow.pop(number, None)
            self._quick.pop(number, None)
            self._forget(waiting)

    def _handle_prompt(self, message: Tokenize, encoded: Future[EncodedPrompt] | None) -> None:
        """Have the worker handle a prompt, and abort those of its outputs that were aborted while it waited."""
        ids = set(message.output_ids)
        aborted = self._forget(message)
        if aborted < ids:
            start_s = time.thread_time()
            self._worker.handle(message, encoded)
            if encoded is None and message.messages is not None and time.thread_time() - start_s > _SLOW_S:
                self._slow_template_until_s = time.monotonic() + _SLOW_TEMPLATE_S
            for request_id in aborted:
                self._worker.handle(Abort(request_id))

    def _forget(self, message: Tokenize) -> set[str]:
        """Forget the ids of a prompt that waits no longer, and return those that were aborted."""
        aborted = self._aborted_ids.intersection(message.output_ids)
        self._aborted_ids -= aborted
        for request_id in message.output_ids:
            self._waiting_ids.pop(request_id, None)
        return aborted

    def _encode_in_background(self, message: Tokenize) -> Future[EncodedPrompt]:
        """Tokenize a prompt on a daemon thread; tokenizers release the GIL."""
        encoded: Future[EncodedPrompt] = Future()

        def encode() -> None:
            try:
                encoded.set_result(self._worker.encoder.encode(message))
            except BaseException as error:
                encoded.set_exception(error)

        threading.Thread(target=encode, name="tokenize", daemon=True).start()
        return encoded
