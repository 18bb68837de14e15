"""Engine loop: it schedules steps, runs them on the engine, and returns the results to the scheduler.

Without overlap, each step is scheduled, run and processed before the next. With overlap, step n + 1 is scheduled and launched
while the device runs step n. The results of step n are processed while the device runs step n + 1 (NanoFlow, arXiv 2408.12757):

    host    | schedule 1 | launch 1 | schedule 2 | launch 2 | wait 1, process 1 | schedule 3 | launch 3 | process 2 | ...
    device               |--------- step 1 ---------|--------- step 2 ---------|--------- step 3 -----------| ...

If grammars restrict the tokens of step n + 1, its token masks depend on step n's tokens, so sampling is delayed:

    host    | schedule 2 | begin 2 | wait 1, process 1 | masks for 2 | finish 2 | schedule 3 | ...
    device  |--- step 1 ---|------ step 2, up to its logits ------|-- sample 2 --|

Step n + 1 is planned before the host knows step n's tokens, which the step reads on the device. So a request that ends with a
stop token runs one step too many, whose token is dropped. The request keeps its pages until that step has been processed.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl_core.engine.engine import BegunStep, Engine
from minisgl_core.engine.step import PendingStep
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.protocol.batch_plan import BatchPlan, TokenMasks
from minisgl_core.protocol.messages import TokenOut
from minisgl_core.scheduler.scheduler import ScheduledStep, Scheduler

Outputs = list[tuple[int, TokenOut]]
"""(tokenizer worker, output) pairs."""


class EngineLoop:
    """Engine loop that runs one step per call."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        hooks: Hooks,
        *,
        overlap: bool,
        send_plan: Callable[[BatchPlan | TokenMasks], None] | None = None,
    ) -> None:
        """`send_plan` sends each plan and its token masks to the other ranks before this rank uses them."""
        self.scheduler, self.engine, self.hooks, self.overlap = scheduler, engine, hooks, overlap
        self._send_plan = send_plan
        self._in_flight: tuple[ScheduledStep, PendingStep] | None = None

    @property
    def has_work(self) -> bool:
        """True if another `step` has something to do."""
        return self._in_flight is not None or self.scheduler.has_work

    def step(self) -> Outputs:
        """Launch the next step if there is one, process the step before it, and return the new outputs."""
        scheduled = self.scheduler.schedule()
        begun = None if scheduled is None else self._begin(scheduled.plan)
        outputs = self.scheduler.collect_aborted()
        before, self._in_flight = self._in_flight, None
        if before is not None and scheduled is not None and len(scheduled.plan.sample.masked):
            outputs += self._process(*before)
            before = None
        if scheduled is not None and begun is not None:
            launched = scheduled, self._finish(scheduled, begun)
            if self.overlap:
                self._in_flight = launched
            else:
                assert before is None
                before = launched
        if before is not None:
            outputs += self._process(*before)
        return outputs

    def _begin(self, plan: BatchPlan) -> BegunStep:
        if self.hooks.batch_scheduled is not None:
            scheduler = self.scheduler
            self.hooks.batch_scheduled(plan=plan, num_waiting=scheduler.num_waiting, num_running=scheduler.num_running)
        if self._send_plan is not None:
            self._send_plan(plan)
        return self.engine.begin(plan)

    def _finish(self, scheduled: ScheduledStep, begun: BegunStep) -> PendingStep:
        masks = self.scheduler.token_masks(scheduled)
        if masks is not None and self._send_plan is not None:
            self._send_plan(masks)
        return self.engine.finish(begun, masks)

    def _process(self, step: ScheduledStep, pending: PendingStep) -> Outputs:
        result = pending.result()
        outputs = self.scheduler.process(step, result)
        if self.hooks.batch_finished is not None:
            self.hooks.batch_finished(plan=step.plan, result=result, state=self.scheduler)
        return outputs
