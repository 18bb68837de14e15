"""Load generator: sends conversations at their arrival times and records every request."""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from minisgl_server.bench.serve.conversations import Conversation
from minisgl_server.bench.serve.prompts import Prompts
from minisgl_server.bench.serve.request import ApiClient, Record


@dataclass(slots=True)
class Outcome:
    """Records and counts of a run.

    Attributes:
        records: record of every sent request, in order of sending.
        num_ended: number of requests that have ended.
        num_failed: number of ended requests without a complete response.
        num_unsent: number of turns that were not sent, as an earlier one failed.
        seconds: time from the start to the last event.
        client_cpu_s: CPU time of this process.
        is_interrupted: the user interrupted the run.
    """

    records: list[Record] = field(default_factory=list)
    num_ended: int = 0
    num_failed: int = 0
    num_unsent: int = 0
    seconds: float = 0.0
    client_cpu_s: float = 0.0
    is_interrupted: bool = False

    @property
    def completed(self) -> list[Record]:
        """Requests with a complete response."""
        return [record for record in self.records if record.error is None and not record.is_interrupted]


class Load:
    """Load generator of one run.

    Args:
        max_concurrency: maximum concurrent conversations; others wait.
        duration_s: time after which no request is sent; running ones are awaited.
        report: called whenever a request was sent or has ended.
    """

    def __init__(
        self,
        client: ApiClient,
        prompts: Prompts,
        max_concurrency: int = sys.maxsize,
        duration_s: float = math.inf,
        report: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self._client, self._prompts = client, prompts
        self._slots = asyncio.Semaphore(max_concurrency)
        self._duration_s = duration_s
        self._report = report
        self._outcome = Outcome()
        self._start_s = 0.0

    async def run(self, conversations: Iterator[Conversation]) -> Outcome:
        """Send all conversations. If it is cancelled, it returns the outcome so far."""
        outcome = self._outcome
        cpu_before = time.process_time()
        self._start_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for conversation in conversations:
                    if not await self._acquire_slot(conversation):
                        break
                    group.create_task(self._run_conversation(conversation))
        except asyncio.CancelledError:
            outcome.is_interrupted = True
        outcome.seconds = max((record.sent_s + record.latency_s for record in outcome.records), default=0.0)
        outcome.client_cpu_s = time.process_time() - cpu_before
        return outcome

    async def _acquire_slot(self, conversation: Conversation) -> bool:
        """Wait until a conversation has arrived and has a slot. Return False if the run has ended by then."""
        if conversation.arrival_s >= self._duration_s:
            return False
        await asyncio.sleep(max(0.0, self._start_s + conversation.arrival_s - time.perf_counter()))
        await self._slots.acquire()
        return not self._is_over()

    def _is_over(self) -> bool:
        return time.perf_counter() - self._start_s >= self._duration_s

    async def _run_conversation(self, conversation: Conversation) -> None:
        try:
            history = self._prompts.start(conversation.prefix)
            for number, turn in enumerate(conversation.turns):
                if number:
                    await asyncio.sleep(conversation.delay_s)
                    if self._is_over():
                        return
                prompt, num_tokens = history.next_prompt(turn.content)
                record = Record(conversation.number, number, num_tokens, turn.output_len)
                if number == 0:
                    record.wait_s = max(0.0, time.perf_counter() - self._start_s - conversation.arrival_s)
                self._outcome.records.append(record)
                self._report(self._outcome)
                text = await self._client.send(prompt, record, self._start_s)
                self._outcome.num_ended += 1
                self._outcome.num_failed += record.error is not None
                self._report(self._outcome)
                if record.error is not None:
                    self._outcome.num_unsent += len(conversation.turns) - number - 1
                    return
                history.add_response(text, turn.placeholder)
        finally:
            self._slots.release()
