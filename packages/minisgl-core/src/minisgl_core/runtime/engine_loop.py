"""Engine loop: it schedules steps, runs them on the model runner, and returns the results to the scheduler.

Without overlap, each step is scheduled, run and processed before the next. With overlap, step n + 1 is scheduled and launched
while the device runs step n. The results of step n are processed while the device runs step n + 1 (NanoFlow, arXiv 2408.12757):

    host    | schedule 1 | launch 1 | schedule 2 | launch 2 | wait 1, process 1 | schedule 3 | launch 3 | process 2 | ...
    device               |--------- step 1 ---------|--------- step 2 ---------|--------- step 3 -----------| ...

Launching a step with prompts may take longer than the rest of step n. Then the results of step n are processed between the
launches of two layers.

If grammars restrict the tokens of step n + 1, its token masks depend on step n's tokens, so sampling is delayed:

    host    | schedule 2 | execute 2 | wait 1, process 1 | masks for 2 | sample 2 | schedule 3 | ...
    device  |--- step 1 ---|------ step 2, up to its logits ------|-- sample 2 --|

Step n + 1 is planned before the host knows step n's tokens, which the step reads on the device. So a request that ends with a
stop token runs one step too many, whose token is dropped. The request keeps its pages until that step has been processed.

With P pipeline stages, up to P steps are in flight, and one more with overlap. Each has a micro-batch, an equal part of the
decoding requests, and stage 1 computes step n while stage 0 computes step n + 1 (arXiv 1811.06965):

    host     | schedule, launch 1 | schedule, launch 2 | wait 1, process 1 | schedule, launch 3 | wait 2, ...
    stage 0           |----- step 1 -----|----- step 2 -----|             |----- step 3 -----| ...
    stage 1                              |----- step 1 -----|----- step 2 -----|             |--- step 3 ...

A request whose token is in flight waits for it, so a step never needs tokens that the host does not know. Chunks of a prompt may
be in several steps in flight, since every stage runs the steps in order.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from minisgl_core.contracts.platform import Event
from minisgl_core.engine.model_runner import ModelRunner
from minisgl_core.engine.step import PROGRESS, ForwardOutput, PendingStep
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.protocol.batch_plan import BatchPlan, StepResult, TokenMasks
from minisgl_core.protocol.messages import TokenBatch
from minisgl_core.scheduler.scheduler import Scheduler

_LEAD_S = 1e-3
"""Safety margin. Scheduling begins this much, plus the duration of scheduling and launching a decode step, before the predicted
end of the step in flight. So the device does not wait for the next step."""
_POLL_S = 1e-3
"""Longest wait of `time_to_schedule` before the step in flight is checked again."""
_MIN_WAIT_S = 5e-5
"""Shorter waits are left out, since a sleep takes longer than that."""

Outputs = list[tuple[int, TokenBatch]]
"""(index of the tokenizer worker, outputs for it) pairs."""


@dataclass(slots=True)
class _InFlight:
    """Launched step.

    Attributes:
        launched_s: time of the launch.
        launch_s: duration of the launch; 0 if steps do not overlap.
        done_s: estimated time when the step was done; 0 before that.
        was_running: True if the step was still running when the next one was being launched.
        progress: see `ForwardOutput.progress`.
        progress_s: time when the step was seen to have reached `progress`; 0 before that.
    """

    plan: BatchPlan
    pending: PendingStep
    launched_s: float
    launch_s: float
    done_s: float
    was_running: bool = False
    progress: Event | None = None
    progress_s: float = 0.0

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of decodes and of prompt tokens."""
        return self.plan.num_decodes, self.plan.num_tokens - self.plan.num_decodes


class EngineLoop:
    """Engine loop that launches at most one step per call."""

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        hooks: Hooks,
        *,
        overlap: bool,
        num_stages: int,
        send_plan: Callable[[BatchPlan | TokenMasks], None] | None,
        receive_result: Callable[[], StepResult] | None,
        deliver: Callable[[Outputs], None] | None,
    ) -> None:
        """Start without steps.

        Args:
            scheduler: plans the steps.
            model_runner: model runner of rank 0.
            hooks: called for each step.
            overlap: True if one more step may be in flight than there are pipeline stages.
            num_stages: pipeline stages.
            send_plan: sends each plan and its token masks to the other ranks before this rank uses them.
            receive_result: waits for the next step's result from the last pipeline stage, if that is another rank.
            deliver: sends outputs of a step while the next one is being launched. If it is None, `step` returns all outputs.
        """
        self.scheduler, self.model_runner, self.hooks, self.overlap = scheduler, model_runner, hooks, overlap
        self._is_pipeline = num_stages > 1
        self._max_in_flight = num_stages - 1 + overlap
        """Maximum number of steps in flight when `step` returns."""
        self._send_plan, self._receive_result = send_plan, receive_result
        self._deliver = None if self._is_pipeline else deliver
        self._in_flight: deque[_InFlight] = deque()
        self._host_s = 0.0
        """Duration of scheduling and launching the newest decode step on the host. Steps with prompts do not count: their
        launch takes longer, but the device runs the first kernels while the host launches the others."""
        self._deliver_s = 0.0
        """Time that `_deliver_if_done` has taken during the newest launch."""
        self._last_done_s = 0.0
        """Time when the last processed step was done. The next step began then if it had been launched before."""

    @property
    def has_work(self) -> bool:
        """True if another `step` has something to do."""
        return bool(self._in_flight) or self.scheduler.has_work

    def time_to_schedule(self) -> float:
        """Return for how many seconds, at most 1 ms, the next `step` should be delayed.

        With overlap, a step is launched while the step before it runs. It is scheduled as late as possible, so that requests
        that arrive meanwhile do not wait for one more step.
        """
        if not self.overlap or self._is_pipeline or len(self._in_flight) != 1:
            return 0.0
        oldest = self._in_flight[0]
        now = time.monotonic()
        done_s = self._predict_done(oldest)
        if oldest.progress is not None and not oldest.progress_s:
            if oldest.progress.query():
                oldest.progress_s = now
                done_s = self._predict_done(oldest)
            else:
                done_s = max(done_s, now + self._rest_time(oldest))
        left_s = done_s - _LEAD_S - self._host_s - now
        if left_s < _MIN_WAIT_S or oldest.done_s:
            return 0.0
        if oldest.pending.is_done():  # it ended since the last check, up to `_POLL_S` ago
            oldest.done_s = now - _POLL_S
            return 0.0
        return min(left_s, _POLL_S)

    def step(self) -> Outputs:
        """Launch the next step if there is one, process the oldest step if enough are in flight, and return new outputs."""
        started_s, self._deliver_s = time.monotonic(), 0.0
        plan = self.scheduler.schedule()
        launched_s = time.monotonic()
        forward_output = None if plan is None else self._execute_model(plan)
        outputs = self.scheduler.collect_aborted()
        if plan is not None and forward_output is not None:
            now = time.monotonic()
            launch_s = now - launched_s - self._deliver_s if self.overlap else 0.0
            if plan.num_tokens == plan.num_decodes:
                self._host_s = now - started_s - self._deliver_s
            # Token masks depend on all tokens before. In a pipeline, the host knew them when it planned the step.
            while self._in_flight and len(plan.sample.masked) and not self._is_pipeline:
                outputs += self._process(self._in_flight.popleft())
            pending = self._sample_tokens(plan, forward_output)
            done_s = time.monotonic() if pending.is_done() else 0.0
            progress = forward_output.progress
            self._in_flight.append(_InFlight(plan, pending, launched_s, launch_s, done_s, progress=progress))
        if self._in_flight and (plan is None or len(self._in_flight) > self._max_in_flight):
            outputs += self._process(self._in_flight.popleft())
        return outputs

    def _began(self, step: _InFlight) -> float:
        """Return the time when the oldest step in flight began."""
        return max(step.launched_s, self._last_done_s)

    def _predict_done(self, step: _InFlight) -> float:
        """Return the expected end of the oldest step in flight."""
        if step.progress_s:
            return step.progress_s + self._rest_time(step)
        return self._began(step) + self.scheduler.step_times.predict(*step.sizes)

    def _rest_time(self, step: _InFlight) -> float:
        """Return the expected time from `progress` to the end of a step."""
        return (1 - PROGRESS) * self.scheduler.step_times.predict(*step.sizes)

    def _execute_model(self, plan: BatchPlan) -> ForwardOutput:
        if self.hooks.batch_scheduled is not None:
            scheduler = self.scheduler
            self.hooks.batch_scheduled(plan=plan, num_waiting=scheduler.num_waiting, num_running=scheduler.num_running)
        if self._send_plan is not None:
            self._send_plan(plan)
        deliver = self._deliver
        return self.model_runner.execute_model(
            plan, None if deliver is None else lambda: self._deliver_if_done(deliver)
        )

    def _deliver_if_done(self, deliver: Callable[[Outputs], None]) -> None:
        """Process the step in flight and deliver its outputs, if it is done while the next one is being launched."""
        if not self._in_flight:
            return
        oldest = self._in_flight[0]
        if not oldest.pending.is_done():
            oldest.was_running = True
            return
        now = time.monotonic()
        if oldest.was_running and not oldest.done_s:
            oldest.done_s = now
        deliver(self._process(self._in_flight.popleft()))
        self._deliver_s = time.monotonic() - now

    def _sample_tokens(self, plan: BatchPlan, forward_output: ForwardOutput) -> PendingStep:
        masks = self.scheduler.token_masks(plan)
        if masks is not None and self._send_plan is not None:
            self._send_plan(masks)
        return self.model_runner.sample_tokens(forward_output, masks)

    def _process(self, oldest: _InFlight) -> Outputs:
        # If the result has arrived unnoticed, such as during the launch of the next step's prompts, it is not known when.
        is_late = not oldest.done_s and not self._is_pipeline and oldest.pending.is_done()
        plan, result = oldest.plan, oldest.pending.result()
        if self._receive_result is not None:
            result = self._receive_result()
        done_s = oldest.done_s or time.monotonic()
        seconds = max(0.0, done_s - self._began(oldest))
        self.scheduler.step_times.observe(*oldest.sizes, seconds, oldest.launch_s, is_upper_bound=is_late)
        self._last_done_s = min(done_s, self._predict_done(oldest)) if is_late else done_s
        outputs = self.scheduler.process(plan, result)
        if self.hooks.batch_finished is not None:
            self.hooks.batch_finished(plan=plan, result=result, state=self.scheduler)
        return outputs
