"""The API server's end of the engine: sends requests to tokenizer workers and hands their output to who waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from minisgl_core.ipc import AsyncReceiver, Endpoints, Sender
from minisgl_core.live_state import State, StateRequest
from minisgl_core.messages import (
    Abort,
    Count,
    Detokenize,
    EngineInfo,
    Rejected,
    Stop,
    Text,
    TextBatch,
    Tokenize,
    Tokens,
)
from minisgl_server.api.errors import ApiError, ClientGoneError, not_ready, rejected, shutting_down, unsendable

logger = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Incoming = EngineInfo | TextBatch | Tokens | Rejected | Count | State | Stop


class Generation:
    """One or more requests to the engine that answer one HTTP request. Made by `EngineClient.start`; close it."""

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._running = {request_id: place for place, request_id in enumerate(request_ids)}
        self._arrived: list[tuple[int, Text]] = []
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        """What `next` waits for."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether all output has been taken, and there was no error."""
        return not self._running and not self._arrived and self._error is None

    async def next(self) -> list[tuple[int, Text]]:
        """Wait for output: the place of a request among those started together, and its new text. Empty at the end.

        Raises:
            ApiError: the engine refused one of the requests, or ends.
            ClientGoneError: nobody is there to answer to.
        """
        while not self._arrived and self._error is None and self._running:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return arrived

    def close(self) -> None:
        """Abort what still runs and forget the rest. Fine to call twice."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for request_id in self._running:
            self._client.abort(request_id)
        self._running.clear()
        self._wake_up()

    def fail(self, error: Exception) -> None:
        """End with an error and abort what still runs."""
        if self._error is None:
            self._error = error
        self.close()

    def watch(self, receive: Receive) -> None:
        """End when the client hangs up; nothing else may read `receive` from now on."""
        self._watch = asyncio.create_task(self._until_disconnected(receive))

    def deliver(self, text: Text) -> None:
        """Take new output of one of the requests."""
        place = self._running[text.request_id]
        if text.finish_reason is not None:
            del self._running[text.request_id]
        self._arrived.append((place, text))
        self._wake_up()

    def reject(self, message: Rejected) -> None:
        """Take the refusal of one of the requests; the others end too."""
        del self._running[message.request_id]
        self.fail(rejected(message))

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _until_disconnected(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._watch = None
        self.fail(ClientGoneError())


class EngineClient:
    """Routes between HTTP requests and tokenizer workers.

    Attributes:
        info: what the engine is; None until it is ready.
        ready: set once it is.
        stopped: set when it is no more.
        is_draining: nothing new begins any more.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self.info: EngineInfo | None = None
        self.ready, self.stopped = asyncio.Event(), asyncio.Event()
        self.is_draining = False
        self._receiver = AsyncReceiver[Any](endpoints.api_in, Incoming)
        self._workers = [Sender(address) for address in endpoints.tokenizer_in]
        self._next_worker = 0
        self._routes: dict[str, tuple[Generation, int]] = {}
        self._asked: dict[str, asyncio.Future[Tokens]] = {}
        self._counting: list[deque[asyncio.Future[dict[str, int]]]] = [deque() for _ in self._workers]
        self._watching: deque[asyncio.Future[State]] = deque()

    @property
    def num_requests(self) -> int:
        """Requests that it holds state of."""
        return len(self._routes)

    def ready_info(self) -> EngineInfo:
        """What the engine is.

        Raises:
            ApiError: 503, it is not ready, or it drains.
        """
        if self.is_draining:
            raise shutting_down()
        if self.info is None:
            raise not_ready()
        return self.info

    def start(self, requests: Sequence[Tokenize], receive: Receive) -> Generation:
        """Send requests to the engine.

        Args:
            requests: to run together; ids must be new.
            receive: the HTTP request's ASGI channel, to notice that the client hung up.

        Raises:
            ApiError: 400, a value inside a free-form field does not fit a message; 503, it drains.
        """
        if self.is_draining:
            raise shutting_down()
        generation = Generation(self, [output_id for request in requests for output_id in request.output_ids])
        try:
            for request in requests:
                worker = self._choose_worker()
                self._routes |= dict.fromkeys(request.output_ids, (generation, worker))
                self._workers[worker].send(request)
        except (OverflowError, RecursionError, UnicodeError):
            generation.close()
            raise unsendable() from None
        generation.watch(receive)
        return generation

    async def ask(self, question: Tokenize | Detokenize) -> Tokens:
        """Have a tokenizer worker turn text into tokens or back; the engine has no part in it. The id must be new.

        Raises:
            ApiError: 400, it was refused or does not fit a message; 500, there is no answer any more.
        """
        answer: asyncio.Future[Tokens] = asyncio.get_running_loop().create_future()
        self._asked[question.request_id] = answer
        try:
            self._workers[self._choose_worker()].send(question)
            return await answer
        except (OverflowError, RecursionError, UnicodeError):
            raise unsendable() from None
        finally:
            del self._asked[question.request_id]

    async def drain(self, timeout_s: float) -> None:
        """Begin nothing new, and wait until what runs has ended; what still runs after `timeout_s` fails."""
        self.is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._routes and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._fail_all(shutting_down())

    def abort(self, request_id: str) -> None:
        """Tell the engine to stop working on a request."""
        route = self._routes.pop(request_id, None)
        if route is not None:
            self._workers[route[1]].send(Abort(request_id))

    async def count(self) -> dict[str, int]:
        """How many requests each process holds state of; see `Count`. Comes back only if every process answers."""
        loop = asyncio.get_running_loop()
        answers = []
        for worker, (sender, waiting) in enumerate(zip(self._workers, self._counting, strict=True)):
            answers.append(loop.create_future())
            waiting.append(answers[-1])
            sender.send(Count(worker=worker))
        counts = {"api": len(self._routes)}
        for answer in answers:
            counts |= await answer
        return counts

    async def state(self, since: int, with_tokens: bool = False) -> State:
        """What the engine does now, with the steps after step `since`. Never comes back if the engine does not answer."""
        answer: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._watching.append(answer)
        self._workers[0].send(StateRequest(worker=0, since=since, with_tokens=with_tokens))
        return await answer

    async def run(self) -> None:
        """Hand out what arrives, until `Stop`: then every request fails."""
        while True:
            match await self._receiver.receive():
                case EngineInfo() as info:
                    self.info = info
                    self.ready.set()
                case TextBatch(outputs):
                    for text in outputs:
                        self._deliver(text)
                case Tokens() as tokens:
                    if (asked := self._asked.get(tokens.request_id)) and not asked.done():
                        asked.set_result(tokens)
                case Rejected() as message:
                    if (asked := self._asked.get(message.request_id)) and not asked.done():
                        asked.set_exception(rejected(message))
                    if route := self._routes.pop(message.request_id, None):
                        route[0].reject(message)
                case Count(worker=worker, counts=counts):
                    answer = self._counting[worker].popleft()
                    if not answer.done():
                        answer.set_result(counts)
                case State() as state:
                    watching = self._watching.popleft()
                    if not watching.done():
                        watching.set_result(state)
                case Stop():
                    self.info = None
                    self._fail_all(ApiError(500, "The engine has stopped.", code="engine_stopped"))
                    self.stopped.set()
                    return

    def close(self) -> None:
        """Close the sockets."""
        self._receiver.close()
        for worker in self._workers:
            worker.close()

    def _fail_all(self, error: ApiError) -> None:
        for generation, _ in list(self._routes.values()):
            generation.fail(error)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)

    def _choose_worker(self) -> int:
        worker = self._next_worker
        self._next_worker = (worker + 1) % len(self._workers)
        return worker

    def _deliver(self, text: Text) -> None:
        route = self._routes.get(text.request_id)
        if route is None:
            return  # aborted, and the output crossed our Abort
        if text.finish_reason is not None:
            del self._routes[text.request_id]
        route[0].deliver(text)
