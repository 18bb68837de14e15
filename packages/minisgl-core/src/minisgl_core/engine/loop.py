"""Joins the scheduler and the engine: plans go out, results come back.

Without overlap, a step is scheduled, run and processed before the next. With overlap, step n + 1 is scheduled and launched
while the device runs step n, whose results are processed meanwhile (NanoFlow, arXiv 2408.12757):

    host    | schedule 1 | launch 1 | schedule 2 | launch 2 | wait 1, process 1 | schedule 3 | launch 3 | process 2 | ...
    device               |--------- step 1 ---------|--------- step 2 ---------|--------- step 3 -----------| ...

Where grammars restrict the tokens of step n + 1, what it samples depends on step n's tokens, so sampling is held back:

    host    | schedule 2 | begin 2 | wait 1, process 1 | masks for 2 | finish 2 | schedule 3 | ...
    device  |--- step 1 ---|------ step 2, up to its logits ------|-- sample 2 --|

Step n + 1 is planned without knowing step n's tokens; they reach it on the device. So a request that ends by a stop token
runs one step too many, whose token is dropped; its pages stay its own until that step has been processed.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl_core.batch import BatchPlan, TokenMasks
from minisgl_core.engine.engine import BegunStep, Engine
from minisgl_core.engine.step import PendingStep
from minisgl_core.messages import TokenOut
from minisgl_core.plugins.hooks import Hooks
from minisgl_core.scheduler.scheduler import ScheduledStep, Scheduler

Outputs = list[tuple[int, TokenOut]]
"""(tokenizer worker, output) pairs."""


class EngineLoop:
    """Runs one step a call."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        hooks: Hooks,
        *,
        overlap: bool,
        send_plan: Callable[[BatchPlan | TokenMasks], None] | None = None,
    ) -> None:
        """`send_plan` gives each plan, and the masks that go with it, to the other ranks before this one uses it."""
        self.scheduler, self.engine, self.hooks, self.overlap = scheduler, engine, hooks, overlap
        self._send_plan = send_plan
        self._in_flight: tuple[ScheduledStep, PendingStep] | None = None

    @property
    def has_work(self) -> bool:
        """Whether another `step` would do anything."""
        return self._in_flight is not None or self.scheduler.has_work

    def step(self) -> Outputs:
        """Launch the next step if there is one, process the step before it, and return what is new."""
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
