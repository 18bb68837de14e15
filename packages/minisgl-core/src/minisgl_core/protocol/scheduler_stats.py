"""Counters of the scheduler."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
