"""Connection of the API server to the engine: sends requests to tokenizer workers and delivers their outputs."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from minisgl_core.protocol.engine_snapshot import EngineSnapshot, SnapshotRequest
from minisgl_core.protocol.messages import (
    Abort,
    Detokenize,
    EngineInfo,
    NoReplica,
    NoSnapshot,
    Rejected,
    RequestCounts,
    Stop,
    Text,
    TextBatch,
    Tokenize,
    TokenizerReply,
    encode,
)
from minisgl_core.runtime.ipc import AsyncReceiver, IpcAddresses, Sender
from minisgl_core.sampling_params import MAX_LOGPROBS
from minisgl_server.api.errors import ApiError, no_replica, rejected, shutting_down, slow_client
from minisgl_server.api.waiting_prompts import WaitingPrompts

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES, MAX_UNSENT_BYTES_PER_OUTPUT = 4 * 2**20, 2**18
"""Limits on the approximate memory of unsent output of a stream whose client does not read: for the first output, and for each
further one. If their sum is exceeded, the request is aborted."""
MAX_UNSENT_PROMPT_BYTES = 2**27
"""Limit on the approximate memory of unsent prompts, which requests with ``echo`` or ``prompt_logprobs`` return. Room for
the log-probabilities of one prompt that fills the context is added."""
_BYTES_PER_TEXT, _BYTES_PER_VALUE = 500, 100
"""Approximate memory of a `Text` without contents, and of a log-probability; a token id takes less."""
Incoming = (
    EngineInfo | TextBatch | TokenizerReply | Rejected | RequestCounts | EngineSnapshot | NoSnapshot | NoReplica | Stop
)
"""Messages that `EngineClient` receives."""


class Generation:
    """Requests that the engine runs for one HTTP request. `EngineClient.start` creates it, and it must be closed."""

    def __init__(self, client: "EngineClient", request_ids: Sequence[str], receive: Receive) -> None:
        self._client = client
        self.is_sending = False
        """True while output is being sent to the client. Output that arrives meanwhile counts as unsent."""
        self._num_unsent_bytes = self._num_unsent_prompt_bytes = 0
        max_seq_len = 0 if client.info is None else client.info.max_seq_len
        self._max_unsent_prompt_bytes = MAX_UNSENT_PROMPT_BYTES + _BYTES_PER_VALUE * (MAX_LOGPROBS + 1) * max_seq_len
        self._max_unsent_bytes = MAX_UNSENT_BYTES + MAX_UNSENT_BYTES_PER_OUTPUT * (len(request_ids) - 1)
        self._running = {request_id: index for index, request_id in enumerate(request_ids)}
        self._arrived: list[tuple[int, Text]] = []
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        """Future that `next` awaits."""
        self._disconnect_task: asyncio.Task[None] | None = asyncio.create_task(self._abort_on_disconnect(receive))
        """Task that reads `receive`; nothing else may read it. None once it has ended."""

    @property
    def is_over(self) -> bool:
        """True if all outputs have been returned by `next`, and there was no error."""
        return not self._running and not self._arrived and self._error is None

    async def next(self) -> list[tuple[int, Text]]:
        """Wait for new outputs. Return each with the index of its id in `request_ids`; an empty list at the end.

        Raises:
            ApiError: one of the requests was rejected, the engine stops, or the client reads too slowly.
            ClientDisconnect: the client disconnected.
        """
        while not self._arrived and self._error is None and self._running:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        self._num_unsent_bytes = self._num_unsent_prompt_bytes = 0
        return arrived

    def close(self) -> None:
        """Abort the requests that still run, and stop watching the client. May be called twice."""
        if self._disconnect_task is not None:
            self._disconnect_task.cancel()
            self._disconnect_task = None
        for request_id in self._running:
            self._client.abort(request_id)
        self._running.clear()
        self._wake_up()

    def fail(self, error: Exception) -> None:
        """Have `next` raise an error, and abort the requests that still run."""
        if self._error is None:
            self._error = error
        self._arrived.clear()
        self.close()

    def deliver(self, text: Text) -> None:
        """Add new output of one of the requests."""
        index = self._running[text.request_id]
        if text.finish_reason is not None:
            del self._running[text.request_id]
        self._arrived.append((index, text))
        self._wake_up()
        if self.is_sending and self._running:  # after the last output, nothing more can arrive
            if text.prompt_token_ids is None and text.prompt_logprobs is None:
                self._num_unsent_bytes += _BYTES_PER_TEXT + _num_bytes(text)
            else:
                self._num_unsent_prompt_bytes += _num_bytes(text)
            if (
                self._num_unsent_bytes > self._max_unsent_bytes
                or self._num_unsent_prompt_bytes > self._max_unsent_prompt_bytes
            ):
                self.fail(slow_client())

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        await _disconnected(receive)
        self._disconnect_task = None
        self.fail(ClientDisconnect())


async def _disconnected(receive: Receive) -> None:
    """Wait until the client of an HTTP request disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _encode(message: msgspec.Struct) -> bytes:
    try:
        return encode(message)
    except (OverflowError, RecursionError, UnicodeError):
        why = "an integer beyond 64 bits, a text with half of a surrogate pair, or values that are nested too deeply"
        raise ApiError(400, f"The request cannot be passed to the engine: it has {why}.") from None


def _num_bytes(text: Text) -> int:
    """Return the approximate memory of the contents of an output, or of a prompt that it repeats."""
    texts = (text.text, text.reasoning, text.prompt_text or "", *(call.arguments for call in text.tool_calls))
    num_values = text.size + len(text.prompt_token_ids or ())
    return sum(map(len, texts)) + _BYTES_PER_VALUE * num_values


class EngineClient:
    """Routes messages between HTTP requests and tokenizer workers.

    Attributes:
        info: description and limits of the engine; None until it is ready.
        ready: set once the engine is ready.
        stopped: set once the engine has stopped.
        no_replica: set while no replica is ready and all fail repeatedly; see `NoReplica`.
        is_draining: True during a shutdown; new requests are refused.
    """

    def __init__(self, addresses: IpcAddresses) -> None:
        self.info: EngineInfo | None = None
        self.ready, self.stopped = asyncio.Event(), asyncio.Event()
        self.is_draining = False
        self.no_replica: NoReplica | None = None
        self._receiver = AsyncReceiver[Any](addresses.api_in, Incoming)
        self._api_worker_id = addresses.api_worker_id
        self._name = f"api {addresses.api_worker_index}" if addresses.num_api_workers > 1 else "api"
        self._workers = {index: Sender(address) for index, address in addresses.own_tokenizer_in.items()}
        self._next_worker = itertools.cycle(self._workers)
        self._routes: dict[str, tuple[Generation, int]] = {}
        """Generation of each running request, and index of the tokenizer worker that has it."""
        self._waiting_prompts = WaitingPrompts()
        self._pending_queries: dict[str | int, asyncio.Future[Any]] = {}
        """Future answer of each query, by request id or, for counts and snapshots, by correlation id."""
        self._correlation_ids = itertools.count(addresses.api_worker_id << 32)
        """Ids that differ from those of the API worker that this one has replaced, whose answers may still arrive."""

    def ready_info(self) -> EngineInfo:
        """Return `info`; raise status 503 if the engine is not ready or has stopped, or the server shuts down."""
        if self.is_draining:
            raise shutting_down()
        if self.stopped.is_set():
            raise ApiError(503, "The engine has stopped.", code="engine_stopped")
        self.check_replicas()
        if self.info is None:
            raise ApiError(503, "The server is starting; try again when GET /ready answers 200.", code="not_ready")
        return self.info

    def check_replicas(self) -> None:
        """Raise status 503 if all replicas fail repeatedly."""
        if self.no_replica is not None:
            raise no_replica(self.no_replica.retry_after_s)

    def start(self, requests: Sequence[Tokenize], receive: Receive) -> Generation:
        """Send requests with new ids to the engine. `receive` tells if the client disconnects.

        Raises:
            ApiError: 400, a value of a free-form field cannot be encoded; 429, see `WaitingPrompts`; 503, the server shuts down.
        """
        if self.is_draining:
            raise shutting_down()
        for request in requests:
            request.api_worker_id = self._api_worker_id
        messages = [_encode(request) for request in requests]
        self._waiting_prompts.add({each.request_id: len(data) for each, data in zip(requests, messages, strict=True)})
        generation = Generation(self, [output_id for request in requests for output_id in request.output_ids], receive)
        for request, message in zip(requests, messages, strict=True):
            worker = next(self._next_worker)
            self._routes |= dict.fromkeys(request.output_ids, (generation, worker))
            self._workers[worker].socket.send(message)
        return generation

    async def query(self, message: Tokenize | Detokenize, receive: Receive) -> TokenizerReply:
        """Have a tokenizer worker answer a message with a new id; the scheduler is not involved.

        If the client of `receive` disconnects, a text that still waits is not tokenized.

        Raises:
            ApiError: 400, the message was rejected or cannot be encoded; 429, see `WaitingPrompts`; 500, the engine has stopped;
                503, the server shuts down.
            ClientDisconnect: the client disconnected.
        """
        worker = next(self._next_worker)
        answer: asyncio.Task[TokenizerReply] = asyncio.create_task(self._ask(worker, message, message.request_id))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._workers[worker].send(Abort(message.request_id))
                raise ClientDisconnect
            return answer.result()
        finally:
            answer.cancel()
            gone.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait for the running ones and for queries; those that still run after `timeout_s` fail."""
        self.is_draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (self._routes or self._pending_queries) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._fail_all(shutting_down())

    def abort(self, request_id: str) -> None:
        """Tell the engine to end a request."""
        route = self._routes.pop(request_id, None)
        if route is not None:
            self._waiting_prompts.remove(request_id)
            self._workers[route[1]].send(Abort(request_id))

    async def count(self) -> dict[str, int]:
        """Return the requests and locked pages that this API worker and the processes behind it hold; see `RequestCounts`."""
        requests = [RequestCounts(worker=each, correlation_id=next(self._correlation_ids)) for each in self._workers]
        counts = {self._name: len(self._routes)}
        for answer in await asyncio.gather(*[self._ask(each.worker, each, each.correlation_id) for each in requests]):
            counts |= answer.counts
        return counts

    async def snapshot(self, since: int, with_tokens: bool = False, replica: int = 0) -> EngineSnapshot:
        """Return a snapshot of a replica with the steps after step `since`; raise status 503 if no replica is ready."""
        worker, correlation_id = next(self._next_worker), next(self._correlation_ids)
        request = SnapshotRequest(
            worker=worker, since=since, with_tokens=with_tokens, correlation_id=correlation_id, replica=replica
        )
        snapshot: EngineSnapshot = await self._ask(worker, request, correlation_id)
        return snapshot

    async def _ask(
        self, worker: int, message: Tokenize | Detokenize | RequestCounts | SnapshotRequest, key: str | int
    ) -> Any:
        """Send a message to a tokenizer worker, and return the answer with this key."""
        data = _encode(message)
        self._waiting_prompts.add({str(key): len(data)})
        answer = self._pending_queries[key] = asyncio.get_running_loop().create_future()
        try:
            self._workers[worker].socket.send(data)
            return await answer
        finally:
            del self._pending_queries[key]
            self._waiting_prompts.remove(str(key))

    def _resolve(self, key: str | int, result: Any) -> None:
        """Have `_ask` return or raise a result, unless it has ended."""
        answer = self._pending_queries.get(key)
        if answer is None or answer.done():
            return
        if isinstance(result, ApiError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    async def run(self) -> None:
        """Receive and deliver messages until `Stop`, or an error; then every request fails."""
        try:
            await self._deliver_messages()
            error = ApiError(500, "The engine has stopped.", code="engine_stopped")
        except Exception:
            # Without this, the server would accept requests and never answer them.
            logger.exception("the API server stops, as it cannot read a message of the engine")
            error = ApiError(500, "The server failed on this request.", code="internal_error")
        self.info = None
        self._fail_all(error)
        self.stopped.set()

    async def _deliver_messages(self) -> None:
        while True:
            match await self._receiver.receive():
                case EngineInfo() as info:
                    self.info, self.no_replica = info, None
                    self.ready.set()
                case NoReplica() as message:
                    self.no_replica = message
                case TextBatch(outputs):
                    for text in outputs:
                        self._deliver(text)
                    await asyncio.sleep(0)  # `receive` does not suspend if the next message has arrived already
                case TokenizerReply() as tokens:
                    self._resolve(tokens.request_id, tokens)
                case Rejected() as message:
                    error = rejected(message)
                    self._resolve(message.request_id, error)
                    self._waiting_prompts.remove(message.request_id)
                    if route := self._routes.pop(message.request_id, None):  # first, so that it is not aborted
                        route[0].fail(error)
                case RequestCounts() | EngineSnapshot() as answer:
                    self._resolve(answer.correlation_id, answer)
                case NoSnapshot(correlation_id):
                    self._resolve(correlation_id, no_replica())
                case Stop():
                    return

    def close(self) -> None:
        self._receiver.close()
        for worker in self._workers.values():
            worker.close()

    def _fail_all(self, error: ApiError) -> None:
        for generation, _ in list(self._routes.values()):
            generation.fail(error)
        for key in self._pending_queries:
            self._resolve(key, error)

    def _deliver(self, text: Text) -> None:
        route = self._routes.get(text.request_id)
        if route is None:
            return  # the request was aborted, and its output crossed our Abort
        self._waiting_prompts.remove(text.request_id)
        if text.finish_reason is not None:
            del self._routes[text.request_id]
        route[0].deliver(text)
