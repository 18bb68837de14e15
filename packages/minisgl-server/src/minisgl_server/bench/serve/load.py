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
    """Records of a run, in order of sending, and its counts.

    Attributes:
        num_failed: number of ended requests without a complete response.
        num_unsent: number of turns that were not sent, as an earlier one failed.
        seconds: time from the start to the last event.
        client_cpu_s: CPU time of this process.
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


async def run_load(
    client: ApiClient,
    prompts: Prompts,
    conversations: Iterator[Conversation],
    max_concurrency: int = sys.maxsize,
    duration_s: float = math.inf,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Send all conversations. If it is cancelled, return the outcome so far.

    After `duration_s`, no request is sent, and running ones are awaited. `report` is called whenever a request was sent or has
    ended.
    """
    outcome, slots = Outcome(), asyncio.Semaphore(max_concurrency)
    cpu_before, start_s = time.process_time(), time.perf_counter()

    def is_over() -> bool:
        return time.perf_counter() - start_s >= duration_s

    async def run_conversation(conversation: Conversation) -> None:
        try:
            history = prompts.start(conversation.prefix)
            for number, turn in enumerate(conversation.turns):
                if number:
                    await asyncio.sleep(conversation.delay_s)
                    if is_over():
                        return
                prompt, num_tokens = history.next_prompt(turn.content)
                record = Record(conversation.number, number, num_tokens, turn.output_len)
                if number == 0:
                    record.wait_s = max(0.0, time.perf_counter() - start_s - conversation.arrival_s)
                outcome.records.append(record)
                report(outcome)
                text = await client.send(prompt, record, start_s)
                outcome.num_ended += 1
                outcome.num_failed += record.error is not None
                report(outcome)
                if record.error is not None:
                    outcome.num_unsent += len(conversation.turns) - number - 1
                    return
                history.add_response(text, turn.placeholder)
        finally:
            slots.release()

    try:
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                if conversation.arrival_s >= duration_s:
                    break
                await asyncio.sleep(max(0.0, start_s + conversation.arrival_s - time.perf_counter()))
                await slots.acquire()
                if is_over():
                    break
                group.create_task(run_conversation(conversation))
    except asyncio.CancelledError:
        outcome.is_interrupted = True
    outcome.seconds = max((record.sent_s + record.latency_s for record in outcome.records), default=0.0)
    outcome.client_cpu_s = time.process_time() - cpu_before
    return outcome
