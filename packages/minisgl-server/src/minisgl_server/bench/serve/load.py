"""Puts load on a server: sends conversations when they are due and keeps a record of every request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minisgl_server.bench.serve.conversations import Conversation
from minisgl_server.bench.serve.http import HttpClient
from minisgl_server.bench.serve.prompts import PromptMaker
from minisgl_server.bench.serve.request import Record, RequestMaker


@dataclass(slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        records: of every request that was sent, in order of sending.
        num_ended: of them, those that are over.
        num_failed: of those, the ones without a whole answer.
        num_unsent: later turns that were not sent because an earlier one failed.
        seconds: from the start to the last event.
        client_cpu_s: processor time of this process.
        is_interrupted: the user ended it early.
    """

    records: list[Record] = field(default_factory=list)
    num_ended: int = 0
    num_failed: int = 0
    num_unsent: int = 0
    seconds: float = 0.0
    client_cpu_s: float = 0.0
    is_interrupted: bool = False

    @property
    def answered(self) -> list[Record]:
        """Requests with a whole answer."""
        return [record for record in self.records if record.error is None and not record.is_interrupted]


class Load:
    """One run.

    Args:
        client: connections to the server.
        maker: makes the requests.
        prompts: makes their prompts.
        max_concurrency: conversations that run at once; a conversation that is due waits for its turn. None for no limit.
        duration_s: nothing is sent after it; what runs is waited for. None for no limit.
        report: called whenever a request was sent or has ended.
    """

    def __init__(
        self,
        client: HttpClient,
        maker: RequestMaker,
        prompts: PromptMaker,
        max_concurrency: int | None = None,
        duration_s: float | None = None,
        report: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self._client, self._maker, self._prompts = client, maker, prompts
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._duration_s = duration_s
        self._report = report
        self._outcome = Outcome()
        self._start_s = 0.0

    async def run(self, conversations: Iterator[Conversation]) -> Outcome:
        """Send them all. Cancelling ends the run early; what is known by then is returned."""
        outcome = self._outcome
        cpu_before = time.process_time()
        self._start_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for conversation in conversations:
                    if not await self._is_due(conversation):
                        break
                    group.create_task(self._talk(conversation))
        except asyncio.CancelledError:
            outcome.is_interrupted = True
        outcome.seconds = max((record.sent_s + record.latency_s for record in outcome.records), default=0.0)
        outcome.client_cpu_s = time.process_time() - cpu_before
        return outcome

    async def _is_due(self, conversation: Conversation) -> bool:
        """Wait until it is to begin; False where that is past the end of the run."""
        if self._duration_s is not None and conversation.at_s >= self._duration_s:
            return False
        await asyncio.sleep(max(0.0, self._start_s + conversation.at_s - time.perf_counter()))
        if self._slots is not None:
            await self._slots.acquire()
        return not self._is_over()

    def _is_over(self) -> bool:
        return self._duration_s is not None and time.perf_counter() - self._start_s >= self._duration_s

    async def _talk(self, conversation: Conversation) -> None:
        try:
            history = self._prompts.start(conversation.prefix)
            for place, turn in enumerate(conversation.turns):
                if place:
                    await asyncio.sleep(conversation.delay_s)
                    if self._is_over():
                        return
                prompt = history.ask(turn.numbers)
                record = Record(conversation.number, place, history.num_tokens, turn.output_len)
                if place == 0:
                    record.wait_s = max(0.0, time.perf_counter() - self._start_s - conversation.at_s)
                self._outcome.records.append(record)
                self._report(self._outcome)
                answer = await self._maker.send(self._client, prompt, record, self._start_s)
                self._outcome.num_ended += 1
                self._outcome.num_failed += record.error is not None
                self._report(self._outcome)
                if record.error is not None:
                    self._outcome.num_unsent += len(conversation.turns) - place - 1
                    return
                history.hear(answer, turn.stand_in)
        finally:
            if self._slots is not None:
                self._slots.release()
