"""The scheduler's arrays, compared with a simulation per request, for random traffic with random tokens instead of a model."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import numpy as np
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minisgl_core.protocol.batch_plan import FROM_DEVICE, BatchPlan, StepResult
from minisgl_core.protocol.messages import Submit
from minisgl_core.sampling_params import SamplingParams
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_core.scheduler.policies import FirstComeFirstServed
from minisgl_core.scheduler.random_numbers import uniforms
from minisgl_core.scheduler.scheduler import Scheduler

VOCAB_SIZE, EOS, MAX_SEQ_LEN = 40, 2, 300


@dataclass
class Sequence:
    """A request as a list of tokens and two counters."""

    submit: Submit
    tokens: list[int]
    num_pending: int = 0
    num_computed: int = 0
    is_ended: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def max_length(self) -> int:
        return len(self.submit.token_ids) + self.submit.sampling.max_tokens

    @property
    def decodes(self) -> bool:
        has_output = self.length > len(self.submit.token_ids)
        return not self.is_ended and has_output and self.num_computed + 1 == self.length < self.max_length

    def reason(self, token: int) -> str | None:
        """Return the finish reason of the newest token, if any."""
        sampling = self.submit.sampling
        if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
            return "stop"
        return "length" if len(self.tokens) == self.max_length else None


class PlainSimulation:
    """Runs a scheduler, and simulates each step request by request."""

    def __init__(self, scheduler: Scheduler, max_in_flight: int, seed: int) -> None:
        self.scheduler, self.max_in_flight, self.draw = scheduler, max_in_flight, random.Random(seed)
        self.sequences: dict[str, Sequence] = {}
        self.in_flight: deque[tuple[BatchPlan, list[tuple[Sequence, bool]]]] = deque()
        self.table: dict[tuple[int, int], int] = {}

    def submit(self) -> None:
        draw, name = self.draw, str(len(self.sequences))
        sampling = SamplingParams(
            max_tokens=draw.choice([1, 2, 9, 40, 250]),
            seed=draw.randrange(9),
            stop_token_ids=tuple(draw.sample(range(3, VOCAB_SIZE), draw.choice([0, 0, 0, 2]))),
            ignore_eos=draw.random() < 0.7,
            logprobs=draw.choice([None, None, 0]),
        )
        shared = [5] * draw.randrange(20)
        tokens = np.array([*shared, *draw.choices(range(3, VOCAB_SIZE), k=draw.randint(1, 25))], np.int32)
        submit = Submit(request_id=name, token_ids=tokens, sampling=sampling, worker=draw.randrange(2))
        self.scheduler.submit(submit)
        self.sequences[name] = Sequence(submit, tokens.tolist())

    def abort(self) -> None:
        if names := sorted(self.scheduler._by_id):
            name = self.draw.choice(names)
            self.sequences[name].is_ended = True
            self.scheduler.abort(name)
        for worker, batch in self.scheduler.collect_aborted():
            assert not batch.request_ids
            assert all(self.sequences[out.request_id].submit.worker == worker for out in batch.outputs)

    def step(self) -> None:
        before = {request.request_id for request in self.scheduler.running}
        plan = self.scheduler.schedule()
        running = {request.request_id: request for request in self.scheduler.running}
        for name in before - running.keys():  # preempted
            self.sequences[name].num_computed = 0
        if plan is not None:
            names = {request.row: name for name, request in running.items()}
            if self.scheduler.limits.num_micro_batches == 1:
                expected = [
                    request.row for name, request in running.items() if name in before and self.sequences[name].decodes
                ]
                assert plan.rows[: plan.num_decodes].tolist() == expected
            self.launch(plan, [self.sequences[names[row]] for row in plan.rows.tolist()])
        if self.in_flight and (plan is None or len(self.in_flight) > self.max_in_flight):
            self.process_result(*self.in_flight.popleft())
        if self.draw.random() < 0.03:  # seldom, because it flushes the recent tokens of all slots
            self.check()

    def launch(self, plan: BatchPlan, sequences: list[Sequence]) -> None:
        """Check a plan, and advance the counters."""
        self.table |= {(row, column): page for row, column, page in plan.page_table_writes.reshape(3, -1).T.tolist()}
        size, slots = self.scheduler.pages.page_size, []
        token_ids, chunks = plan.token_ids.tolist(), []
        uniform = dict(zip(plan.sample.index.tolist(), plan.sample.uniform, strict=True))
        for i, sequence in enumerate(sequences):
            start, num_new, row = int(plan.starts[i]), int(plan.num_new[i]), int(plan.rows[i])
            ids, token_ids = token_ids[:num_new], token_ids[num_new:]
            if i < plan.num_decodes:
                assert sequence.decodes
                assert (start, num_new) == (sequence.length - 1, 1)
            if i < plan.num_decodes and sequence.num_pending:
                assert ids == [FROM_DEVICE]
            else:
                assert ids == sequence.tokens[start : start + num_new]
            sequence.num_computed = start + num_new
            slots += [(self.table[row, at // size], at % size) for at in range(start, start + num_new)]
            samples = sequence.num_computed == sequence.length
            assert samples == (i in uniform)
            if samples:
                count = sequence.length - len(sequence.submit.token_ids)
                seed = np.array([sequence.submit.sampling.seed], np.uint64)
                assert uniform[i] == uniforms(seed, np.array([count], np.int32))[0]
            sequence.num_pending += samples
            chunks.append((sequence, samples))
        assert not token_ids
        assert len(set(slots)) == len(slots), "two tokens go to one slot"
        self.in_flight.append((plan, chunks))

    def process_result(self, plan: BatchPlan, chunks: list[tuple[Sequence, bool]]) -> None:
        """Process a step with random tokens, and check its outputs."""
        tokens, expected = [], {}
        for sequence in [sequence for sequence, samples in chunks if samples]:
            tokens.append(self.draw.choice([EOS, *range(3, VOCAB_SIZE)]))
            sequence.num_pending -= 1
            if not sequence.is_ended:
                sequence.tokens.append(tokens[-1])
                reason = sequence.reason(tokens[-1])
                sequence.is_ended = reason is not None
                expected[sequence.submit.request_id] = (sequence.submit.worker, tokens[-1], reason)
        found = {}
        for worker, batch in self.scheduler.process(plan, StepResult(np.array(tokens, np.int64), [], [])):
            for out in batch.outputs:
                assert out.num_prompt_tokens == len(self.sequences[out.request_id].submit.token_ids)
                found[out.request_id] = (worker, *out.token_ids, out.finish_reason)
            for name, token in zip(batch.request_ids, batch.token_ids.tolist(), strict=True):
                assert name not in found
                assert len(self.sequences[name].tokens) > len(self.sequences[name].submit.token_ids) + 1
                found[name] = (worker, token, None)
        assert found == expected

    def check(self) -> None:
        self.scheduler.check()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            sequence = self.sequences[request.request_id]
            assert request.tokens.tolist() == sequence.tokens
            assert request.max_tokens_left == sequence.max_length - len(sequence.tokens)


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 4, 16]),
    cache=st.sampled_from(["radix", "naive"]),
    max_running=st.integers(1, 12),
    max_prefill=st.sampled_from([3, 16, 200]),
    max_in_flight=st.integers(0, 2),
    slack=st.integers(0, 300),
    rate=st.sampled_from([0.05, 0.3]),
)
def test_schedules_equal_the_plain_simulation(
    seed: int,
    page_size: int,
    cache: str,
    max_running: int,
    max_prefill: int,
    max_in_flight: int,
    slack: int,
    rate: float,
) -> None:
    limits = SchedulerLimits(
        max_running=max_running,
        max_prefill_tokens=max_prefill,
        max_queued=10**6,
        max_seq_len=MAX_SEQ_LEN,
        num_pages=1 + -(-(MAX_SEQ_LEN + slack) // page_size),
        page_size=page_size,
        eos_ids=frozenset((EOS,)),
        vocab_size=VOCAB_SIZE,
        num_micro_batches=1 if max_in_flight < 2 else 3,
    )
    provider = tiny.registry().load("prefix_cache", cache)
    walk = PlainSimulation(Scheduler(limits, provider(page_size), FirstComeFirstServed()), max_in_flight, seed)
    for _ in range(150):
        if walk.draw.random() < rate:
            walk.submit()
        if walk.draw.random() < rate / 4:
            walk.abort()
        walk.step()
    while walk.scheduler.has_work:
        walk.step()
    assert all(sequence.is_ended for sequence in walk.sequences.values())
    assert walk.scheduler.num_pages_used == 0
    walk.check()
