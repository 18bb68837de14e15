"""Joins the scheduler and the engine: plans go out, results come back.

Without overlap, a step is scheduled, run and processed before the next. With overlap, step n + 1 is scheduled and launched
while the device runs step n, whose results are processed meanwhile (NanoFlow, arXiv 2408.12757):

    host    | schedule 1 | launch 1 | schedule 2 | launch 2 | wait 1, process 1 | schedule 3 | launch 3 | process 2 | ...
    device               |--------- step 1 ---------|--------- step 2 ---------|--------- step 3 -----------| ...

Step n + 1 is planned without knowing step n's tokens; they reach it on the device. So a request that ends by a stop token
runs one step too many, whose token is dropped; its pages stay its own until that step has been processed.
"""

from __future__ import annotations

from collections.abc import Callable

from minisgl_core.batch import BatchPlan
from minisgl_core.engine.engine import Engine
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
        send_plan: Callable[[BatchPlan], None] | None = None,
    ) -> None:
        """`send_plan` gives each plan to the other ranks, before this one launches it."""
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
        launched = None if scheduled is None else (scheduled, self._launch(scheduled.plan))
        if not self.overlap:
            assert self._in_flight is None
            self._in_flight, launched = launched, None
        before, self._in_flight = self._in_flight, launched
        outputs = self.scheduler.collect_aborted()
        if before is not None:
            step, pending = before
            result = pending.result()
            outputs += self.scheduler.process(step, result)
            if self.hooks.batch_finished is not None:
                self.hooks.batch_finished(plan=step.plan, result=result, state=self.scheduler)
        return outputs

    def _launch(self, plan: BatchPlan) -> PendingStep:
        if self.hooks.batch_scheduled is not None:
            scheduler = self.scheduler
            self.hooks.batch_scheduled(plan=plan, num_waiting=scheduler.num_waiting, num_running=scheduler.num_running)
        if self._send_plan is not None:
            self._send_plan(plan)
        return self.engine.launch(plan)
