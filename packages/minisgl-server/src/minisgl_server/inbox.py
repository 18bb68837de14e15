"""In what order a tokenizer worker does what it is asked for."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from minisgl_core.ipc import Receiver
from minisgl_core.messages import Abort, Count, Detokenize, Stop, Tokenize

if TYPE_CHECKING:
    from minisgl_server.tokenizer_worker import Encoded, TokenizerWorker

_LONG = 50_000
"""Characters that take about a tenth of a second to turn into tokens."""
_PER_MESSAGE = 50
"""Characters that take as long as the template does for one message."""
_LOOK_S = 0.005
"""Between two looks whether that is done."""
_MOST_BEFORE = 16
"""Messages that are handled before what waits to be tokenized has its turn."""


class Inbox:
    """What a worker does next.

    To turn a long prompt into tokens takes seconds, in which others wait for their text. So that is done beside, one prompt at
    a time, and what is to be tokenized waits until nothing else is there, though not for ever. Who hangs up meanwhile costs
    nothing.
    """

    def __init__(self, worker: TokenizerWorker) -> None:
        self._worker = worker
        self._later: deque[Tokenize | Detokenize | Count] = deque()
        self._waiting_ids: set[str] = set()
        """Of what is to be run."""
        self._aborted_ids: set[str] = set()
        """Those of them that nobody waits for any more."""
        self._num_before = 0
        self._beside: tuple[Tokenize, Future[Encoded]] | None = None

    def run(self, receiver: Receiver[Any]) -> None:
        """Until `Stop`."""
        while True:
            wait_s = _LOOK_S if self._beside is not None else 0 if self._later else None
            message = receiver.receive(wait_s)
            if isinstance(message, Stop):
                return
            if message is not None:
                self.take(message)
            if message is None or self._num_before >= _MOST_BEFORE:
                self.do_next()

    def take(self, message: Any) -> None:
        """Handle a message, or keep it for later. A `Count` is to come after all that was sent before it."""
        match message:
            case Tokenize() | Detokenize() | Count():
                self._later.append(message)
                if isinstance(message, Tokenize):
                    self._waiting_ids.update(message.output_ids)
            case Abort(request_id) if request_id in self._waiting_ids:
                self._aborted_ids.add(request_id)
            case _:
                self._num_before += bool(self._later)
                self._worker.handle(message)

    def do_next(self) -> None:
        """Handle the first message that was kept; one that takes long is begun, and handled once it can be."""
        self._num_before = 0
        if self._beside is not None:
            message, encoded = self._beside
            if encoded.done():
                self._beside = None
                self._run(message, encoded)
        elif self._later:
            kept = self._later.popleft()
            if not isinstance(kept, Tokenize):
                self._worker.handle(kept)
            elif (_length(kept) > _LONG or kept.chat_template is not None) and not self._aborted_ids.issuperset(
                kept.output_ids
            ):
                self._beside = kept, self._encode_beside(kept)
            else:
                self._run(kept, None)

    def _run(self, message: Tokenize, encoded: Future[Encoded] | None) -> None:
        ids = set(message.output_ids)
        aborted = ids & self._aborted_ids
        self._waiting_ids -= ids
        self._aborted_ids -= ids
        if aborted < ids:
            self._worker.handle(message, encoded)
            for request_id in aborted:
                self._worker.handle(Abort(request_id))

    def _encode_beside(self, message: Tokenize) -> Future[Encoded]:
        """By a thread that ends with the process; tokenizers let others run meanwhile."""
        encoded: Future[Encoded] = Future()

        def encode() -> None:
            try:
                encoded.set_result(self._worker.encode(message))
            except BaseException as error:
                encoded.set_exception(error)

        threading.Thread(target=encode, name="tokenize", daemon=True).start()
        return encoded


def _length(message: Tokenize) -> int:
    """About how many characters."""
    return message.num_chars + _PER_MESSAGE * len(message.messages or ())
