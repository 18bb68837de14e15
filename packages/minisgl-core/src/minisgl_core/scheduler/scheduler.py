"""Continuous batching with chunked prefill, admission by pages, preemption and resumption.

Each step is one batch: one token per decoding request, and up to `SchedulerLimits.max_prefill_tokens` prompt tokens (the
chunked prefill of Sarathi-Serve, arXiv 2403.02310). If `max_step_s` limits its duration, it has fewer prompt tokens. The
scheduler only plans steps. The engine loop runs the plans and returns their results in order, possibly one step late
(overlap), or several steps late (pipeline parallelism).

Decoding requests are handled together, as rows of `RunningRequests`. Only prefills, requests that end, and those with a grammar
or log-probabilities are handled one by one.

The file is long because admission, preemption and the end of requests change one shared state.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from minisgl_core.contracts.grammar import GrammarBackend
from minisgl_core.contracts.policy import Policy, RequestView
from minisgl_core.contracts.prefix_cache import PrefixCache
from minisgl_core.errors import InvalidValueError, PluginError, QueueFullError
from minisgl_core.kv.allocator import Int32Array
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.protocol.batch_plan import BatchPlan, StepResult, TokenMasks
from minisgl_core.protocol.messages import Rejected, Submit, TokenBatch, TokenLogprobs, TokenOut
from minisgl_core.protocol.scheduler_stats import SchedulerStats
from minisgl_core.scheduler.constraints import GrammarManager
from minisgl_core.scheduler.limits import SchedulerLimits
from minisgl_core.scheduler.page_manager import PageManager
from minisgl_core.scheduler.planner import Chunk, Planner
from minisgl_core.scheduler.request import Request
from minisgl_core.scheduler.running_requests import RunningRequests
from minisgl_core.scheduler.step_times import StepTimes
from minisgl_core.scheduler.waiting_queue import WaitingQueue, queue_key

logger = logging.getLogger(__name__)

_NO_ROWS = np.empty(0, np.int32)
_COMPILE_WAIT_S = 0.02
"""Longest wait for a grammar to be compiled while no other request can run."""
_FEW_WAITING = 3
"""Number of waiting requests that count as few in `_schedule_prefills`."""


def _no_grammar_backend() -> GrammarBackend:
    raise PluginError("this scheduler was made without a grammar backend")


class Scheduler:
    """Scheduler of all requests: `schedule` plans steps, `process` takes their results in order.

    See `minisgl_core.runtime.engine_loop` for the calls.

    Attributes:
        step_planned: function called with each step's plan; None for no call.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: PrefixCache,
        policy: Policy,
        hooks: Hooks | None = None,
        grammars: GrammarManager | None = None,
    ) -> None:
        """Start without requests. `hooks` None calls no hooks, and `grammars` None is for requests without grammars."""
        self.limits = limits
        self.grammars = grammars or GrammarManager(_no_grammar_backend, limits.vocab_size)
        hooks = hooks or Hooks()
        self._request_finished = hooks.request_finished
        self._running = RunningRequests(limits)
        self.pages = PageManager(limits.num_pages, limits.page_size, cache, self._running, hooks)
        capacity = self.pages.allocator.capacity * limits.page_size
        assert limits.max_seq_len <= capacity, f"{limits.max_seq_len} tokens do not fit in a pool for {capacity} tokens"
        self.planner = Planner(limits.max_running, limits.vocab_size, self._running)
        self.policy = policy
        self.stats = SchedulerStats()
        self.step_times = StepTimes(limits.max_step_s)
        self._waiting = WaitingQueue()
        self._by_id: dict[str, Request] = {}
        self._num_arrived = 0
        self._aborted: list[tuple[int, TokenOut]] = []
        self.step_planned: Callable[[BatchPlan], None] | None = None

    # Called by the owner of the loop.

    def validate(self, submit: Submit) -> None:
        """Raise InvalidValueError if the request's id is in use, or the request fails `SchedulerLimits.check`."""
        if submit.request_id in self._by_id:
            raise InvalidValueError("request_id", submit.request_id, "unused among the requests that have not ended")
        self.limits.check(submit)

    def submit(self, submit: Submit) -> None:
        """Queue a request.

        Raises:
            InvalidValueError: the request fails `validate`.
            QueueFullError: the queue is at its bound, or too much text of grammars waits to be compiled.
        """
        self.validate(submit)
        if self.is_full:
            raise QueueFullError(f"{self.num_waiting} requests are waiting already; try again later")
        self._num_arrived += 1
        constraint = None
        if submit.grammar is not None:
            constraint = self.grammars.start(submit.grammar)
        request = Request(
            submit,
            self._running,
            arrival=self._num_arrived,
            seed=random.getrandbits(64),
            eos_ids=self.limits.eos_ids,
            constraint=constraint,
        )
        self._by_id[request.request_id] = request
        if constraint is None:
            self._waiting.add(request)
        else:
            self._waiting.add_compiling(request, constraint)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Abort a waiting or running request; `reason` as in `Abort`. Unknown ids are ignored, as it may have just finished."""
        request = self._by_id.get(request_id)
        if request is None or request.finish_reason is not None:
            return
        self._aborted.append((request.worker, self._finish(request, reason, [])))

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without a page-table row, in queue order; not to be changed."""
        return self._waiting.all()

    @property
    def running(self) -> Sequence[Request]:
        """Requests with a page-table row, in order of admission."""
        return self._running.all()

    def at_row(self, row: int) -> Request:
        """Return the running request with a page-table row."""
        return self._running[row]

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, which hold no pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests with a page-table row."""
        return len(self._running)

    @property
    def is_full(self) -> bool:
        """True if `submit` refuses requests: `max_queued` requests wait, in addition to one per free page-table row."""
        return self.num_waiting >= self.limits.max_queued + self._running.num_free_rows

    @property
    def num_pages_used(self) -> int:
        """Pages that running requests own or read from the cache, so that they cannot be taken."""
        return self.pages.allocator.capacity - self.pages.num_available

    @property
    def has_work(self) -> bool:
        """True if a request is left, or an output has not been collected yet."""
        return bool(self._by_id or self._running or self._aborted)

    # Called by the engine loop.

    def schedule(self) -> BatchPlan | None:
        """Plan the next step. Return None if nothing can run yet.

        Then `process` must handle a step in flight first, or requests wait only for their grammars to be compiled.
        """
        self._end_compiling()
        scheduled = self._schedule_decodes()
        if scheduled is None:
            return None
        decodes, prefill_rows = scheduled
        prefills = self._schedule_prefills(len(decodes), prefill_rows)
        if not len(decodes) and not prefills:
            if self._waiting.is_compiling and not self._running and not self._aborted:
                self._end_compiling(_COMPILE_WAIT_S)
                return None
            return self._unblock()
        plan = self.planner.plan(decodes, prefills, self.pages.drain_table_writes())
        self._running.count_planned(plan.rows, plan.rows[plan.sample.index], decodes)
        self.stats.num_steps += 1
        self.stats.num_prefilled_tokens += sum(chunk.num_new for chunk in prefills)
        if self.step_planned is not None:
            self.step_planned(plan)
        return plan

    def token_masks(self, plan: BatchPlan) -> TokenMasks | None:
        """Return the token masks of a step, or None if nothing restricts it.

        All earlier steps with the masked requests must have been processed.
        """
        if not len(plan.sample.masked):
            return None
        requests = self._at(plan, plan.sample.index[plan.sample.masked])
        constraints = [None if request.finish_reason else request.constraint for request in requests]
        banned = [each.banned_tokens(self.limits.eos_ids) for each in requests]
        words = self.grammars.fill(constraints, banned, [each.token_rules for each in requests])
        return TokenMasks(words=words.ravel())

    def process(self, plan: BatchPlan, result: StepResult) -> list[tuple[int, TokenBatch]]:
        """Update the requests from a step's result. Return the output for each tokenizer worker."""
        running = self._running
        for request, part in zip(self._at(plan, plan.prompt_logprobs), result.prompt_logprobs, strict=True):
            if request.prompt_logprobs is not None:
                request.prompt_logprobs.append(part)
        sampled = plan.rows[plan.sample.index]
        running.count_processed(plan.rows, sampled)
        live = np.flatnonzero(running.is_live(sampled))
        rows, tokens = sampled[live], result.tokens[live]
        is_token_only = running.add_tokens(rows, tokens)
        self.stats.num_output_tokens += len(rows)
        outputs = []
        for index in np.flatnonzero(~is_token_only).tolist():
            request = running[int(rows[index])]
            logprobs = result.logprobs[live[index]] if result.logprobs else None
            outputs.append((request.worker, self._output(request, int(tokens[index]), logprobs)))
        batches = self._batches(outputs, rows[is_token_only], tokens[is_token_only])
        for request in running.removable(plan.rows):
            self._release(request)
        return batches

    def collect_aborted(self) -> list[tuple[int, TokenBatch]]:
        """Return the last outputs of the requests that were aborted since the last call, for each tokenizer worker."""
        aborted, self._aborted = self._aborted, []
        return self._batches(aborted, _NO_ROWS, _NO_ROWS)

    def _at(self, plan: BatchPlan, indices: Int32Array) -> list[Request]:
        return [self._running[row] for row in plan.rows[indices].tolist()]

    def _batches(
        self, outputs: list[tuple[int, TokenOut]], rows: Int32Array, tokens: npt.NDArray[np.integer[Any]]
    ) -> list[tuple[int, TokenBatch]]:
        """Return the message for each tokenizer worker, from outputs and from the tokens of rows that have no other output."""
        batches: dict[int, TokenBatch] = {}
        workers = self._running.worker[rows]
        for worker in np.flatnonzero(np.bincount(workers)).tolist():
            is_own = workers == worker
            request_ids = self._running.request_id[rows[is_own]].tolist()
            batches[worker] = TokenBatch([], request_ids=request_ids, token_ids=tokens[is_own].astype(np.int32))
        for worker, output in outputs:
            batches.setdefault(worker, TokenBatch([])).outputs.append(output)
        return list(batches.items())

    # Decodes.

    def _schedule_decodes(self) -> tuple[Int32Array, Int32Array] | None:
        """Return the rows that decode, after giving them pages, and the rows that have more tokens to prefill.

        Return None if a request must be preempted, but a step in flight may still use its pages.
        """
        running, pages = self._running, self.pages
        decodes, prefills = self._next_rows()
        while len(without_page := pages.decodes_without_page(decodes)) > pages.num_available:
            if running.num_inflight.any():
                return None
            self._preempt_last()
            decodes, prefills = self._next_rows()
        pages.take_one_each(without_page)
        return decodes, prefills

    def _next_rows(self) -> tuple[Int32Array, Int32Array]:
        decodes, prefills = self._running.schedulable()
        if self.limits.num_micro_batches > 1:
            # An equal share of the requests per micro-batch in flight.
            size = -(-len(decodes) // self.limits.num_micro_batches)
            decodes = decodes[self._running.num_pending[decodes] == 0][:size]
        return decodes, prefills

    def _preempt_last(self) -> None:
        """Release the pages of the running request that is last in queue order, and queue it again.

        It resumes from its tokens, whose KV may still be cached.
        """
        request = max(self._running.all(), key=queue_key)
        self.stats.num_preemptions += 1
        request.num_preemptions += 1
        self.pages.release(request)
        self._waiting.add(request)

    def _unblock(self) -> BatchPlan | None:
        """Preempt a request when nothing could be planned and no step in flight can change that."""
        if self._waiting and not self._running and not self._aborted:
            raise PluginError(
                f"no waiting request can be admitted, although no request runs: {self.num_pages_used} of "
                f"{self.pages.allocator.capacity} pages are not free, and the prefix cache "
                f"{type(self.pages.cache)} cannot evict them"
            )
        schedulable = self._running.schedulable()
        if not any(map(len, schedulable)) or self._running.num_inflight.any():
            return None
        assert len(self._running) > 1, "a single running request must fit in the pool"
        self._preempt_last()
        return self.schedule()

    # Prefills.

    def _end_compiling(self, timeout_s: float = 0.0) -> None:
        """Make requests admissible whose grammars are compiled, and end those whose grammars are invalid."""
        for request in self._waiting.end_compiling(timeout_s):
            self._aborted.append((request.worker, self._finish(request, "abort", [])))

    def _schedule_prefills(self, num_decodes: int, rows: Int32Array) -> list[Chunk]:
        limit = self.limits.max_prefill_tokens
        budget = self.step_times.prompt_tokens(num_decodes, limit)
        # A step with fewer prompts is shorter and returns their first tokens earlier. So if `max_step_s` limits the budget,
        # `_admit` adds a request to other chunks only if half of the budget is left. If few requests wait, half must be left even
        # after the whole prompt. If many wait, that would delay the last ones.
        min_left = 0 if budget == limit else budget // 2
        chunks: list[Chunk] = []
        for row in rows.tolist():
            if budget > 0:
                request = self._running[row]
                self.pages.attach_cached(request)
                budget -= self._add_chunk(request, budget, chunks)
        if self._waiting.admissible and budget > 0 and self._running.num_free_rows > 0:
            self._admit(budget, min_left, chunks)
        return chunks

    def _in_order(self, waiting: list[Request]) -> Sequence[Request]:
        """Return the waiting requests in the policy's order. A request that a policy leaves out would wait forever."""
        given = waiting.copy()
        num_cached = cast(Callable[[RequestView], int], self.pages.num_cached_tokens)
        ordered = self.policy.order(given, self._running.all(), num_cached)
        has_all = isinstance(ordered, Sequence) and len(ordered) == len(waiting)
        if not has_all or (ordered is not given and set(map(id, ordered)) != set(map(id, waiting))):
            raise PluginError(
                f"the policy {type(self.policy)} must return exactly the requests that it was given, reordered"
            )
        return cast(Sequence[Request], ordered)

    def _admit(self, budget: int, min_left: int, chunks: list[Chunk]) -> None:
        """Admit waiting requests while the budget, rows and pages suffice; see `_schedule_prefills` for `min_left`."""
        few_wait = len(self._waiting.admissible) <= _FEW_WAITING
        num_reserved_pages = self.pages.num_reserved()
        for request in self._in_order(self._waiting.admissible):
            if budget <= 0 or self._running.num_free_rows == 0:
                return
            num_tokens = min(request.length + 1, self.limits.max_seq_len)
            if self.pages.surely_lacks_pages(request, num_tokens, self.pages.num_available - num_reserved_pages):
                return
            self._running.assign(request)
            self.pages.attach_cached(request)
            num_needed = request.length - request.num_computed if few_wait else 1
            has_room = not chunks or min_left == 0 or budget - num_needed >= min_left
            missing = self.pages.missing_pages(request, num_tokens)
            if not has_room or missing > self.pages.num_available - num_reserved_pages:
                self.pages.detach(request)
                return
            self._waiting.remove(request)
            self._running.admit(request)
            self.planner.register(request)
            if request.num_cached < 0:
                request.num_cached = request.num_computed
                request.scheduled_s = time.monotonic()
                if request.num_cached > 0:
                    self.pages.cache.count_hit(request.handle)
                self.stats.num_prompt_tokens += request.num_prompt_tokens
                self.stats.num_cached_tokens += request.num_computed
            budget -= self._add_chunk(request, budget, chunks)
            num_reserved_pages += self.pages.missing_pages(request, request.length + 1)

    def _add_chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        """Plan the request's next chunk. Return how many tokens of the budget it uses."""
        num_new = min(request.length - request.num_computed, budget)
        end = request.num_computed + num_new
        if self.pages.missing_pages(request, end) > self.pages.num_available:
            return 0
        self.pages.take(request, end)
        chunks.append(Chunk(request, request.num_computed, num_new, is_last=end == request.length))
        request.num_computed = end
        self.pages.share(request)
        return num_new

    # End of requests.

    def _output(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> TokenOut:
        """Return the output of a request that got a token, and end the request if the token is its last."""
        if request.first_token_s is None:
            request.first_token_s = time.monotonic()
        reason = self._reason_to_stop(request, token)
        if reason is None:
            output = _new_tokens(request, [token])
        else:
            output = self._finish(request, reason, [token])
            output.stop_token_id = token if token in request.stop_ids else None
        if logprobs is not None:
            output.logprobs = [logprobs]
        if request.num_output == 1 and request.sampling.prompt_logprobs is not None:
            output.prompt_logprobs = request.prompt_logprobs
            request.prompt_logprobs = None
        return output

    def _reason_to_stop(self, request: Request, token: int) -> str | None:
        constraint = request.constraint
        if constraint is not None:
            constraint.accept(token)
            if constraint.error:
                self.grammars.discard(constraint)
                return "abort"
        if token in request.stop_ids or (constraint is not None and constraint.is_finished):
            return "stop"
        return "length" if request.num_tokens >= request.max_length else None

    def _finish(self, request: Request, reason: str, token_ids: list[int]) -> TokenOut:
        request.finish_reason = reason
        logger.debug("the request has ended: %s", reason, extra={"request_id": request.request_id})
        self.stats.num_finished += 1
        self.stats.num_aborted += reason == "abort"
        del self._by_id[request.request_id]
        if request.row == 0:
            self._waiting.remove(request)
            self._report(request)
        else:
            self._running.end(request)
            if request.num_inflight == 0:
                self._release(request)
        output = _new_tokens(request, token_ids)
        if request.constraint is not None and (why := request.constraint.error):
            param = request.constraint.param
            kind = "internal" if param is None else "invalid"
            output.rejected = Rejected(request_id=request.request_id, kind=kind, message=why, param=param)
        return output

    def _release(self, request: Request) -> None:
        self.pages.release(request)
        self._report(request)

    def _report(self, request: Request) -> None:
        if self._request_finished is not None:
            self._request_finished(record=request.record(), state=self)

    def check(self) -> None:
        """Verify that pages, page-table rows and the map of requests agree. For tests."""
        self.pages.check()
        running = self._running.all()
        live = {id(request) for request in self._by_id.values()}
        assert all(id(request) in live for request in self.waiting), "a waiting request is not in the map"
        assert all(id(r) in live or r.num_inflight for r in running), "a finished request still runs"
        assert len(live) == self.num_waiting + sum(id(r) in live for r in running), "a request is nowhere"
        self._running.check()


def _new_tokens(request: Request, token_ids: list[int]) -> TokenOut:
    return TokenOut(
        request_id=request.request_id,
        token_ids=token_ids,
        finish_reason=request.finish_reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(request.num_cached, 0),
    )
